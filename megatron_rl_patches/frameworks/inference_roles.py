"""The set-up functions of slime, miles, NeMo-RL and AReaL, made to build a model that only scores.

Frameworks build every model alike: DDP, its gradient buffers, Adam. Inside of :func:`inference_role`
Megatron's ``get_model`` leaves out DDP, and then the factories leave out optimizer and scheduler. If
``get_model`` did not run, or had to wrap the model, the framework builds the model as usual.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from ..common.chunks import distinct_configs
from ..common.messages import Message
from ..common.scopes import Scope, replaced
from ..engine.call import Call
from ..errors import CheckpointError
from ..inference.checkpoints.load import read_iteration
from ..inference.models.isolation import preserved_rng
from ..inference.models.model import freeze, refuse_to_train
from ..inference.models.provider import without_training

_BUILT_FOR_TRAINING = Message(
    "the model of role {role!r} was built for training, as without the patch: {reason}",
    "It works, but takes memory for gradient buffers and an optimizer.",
    "Change what the reason names, or leave the role out of MEGATRON_RL_PATCHES_INFERENCE_ROLES.",
)

_SETTING = "Settings.inference_roles (MEGATRON_RL_PATCHES_INFERENCE_ROLES)"
# With these arguments the data-parallel wrapper shards the model's parameters.
_SHARDED = ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp")
# Up to megatron-core 0.14 the loader asserts that these are zero; the policy's checkpoint has set them.
_CONSUMED = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
# With this option miles builds no optimizer and no scheduler for any role.
_NO_OPTIMIZER = "debug_disable_optimizer"


@dataclass
class InferenceRole:
    """One model while it is built."""

    role: str
    framework_args: Any = None  # where these say whether an optimizer is built
    ddp_skipped: bool = False  # get_model has left out DDP, so optimizer and scheduler are left out, too
    #: Why DDP was not left out.
    reason_skipped: str = (
        "megatron.training.training.get_model was not called; status() tells whether it is patched"
    )


_scope: Scope[InferenceRole] = Scope("inference_role")


def inference_role(role: str, framework_args: Any = None) -> AbstractContextManager[InferenceRole]:
    """Build, until the end of the block and in this thread, the model of a role that only scores."""
    return _scope.enter(InferenceRole(role, framework_args))


def ddp_skipped() -> bool:
    """Return whether this runs inside of :func:`inference_role`, after ``get_model`` has left out DDP."""
    current = _scope.get()
    return current is not None and current.ddp_skipped


def freeze_role(model: Sequence[torch.nn.Module], role: str, setting: str = _SETTING) -> None:
    """Freeze chunks that have no DDP, give them a config of their own, and have them refuse to train.

    With a config that the policy shares, the model would run in the policy's ``no_sync``. Errors name the
    role, and the setting as what to change for a model that trains.
    """
    modules = [module for chunk in model for module in chunk.modules()]
    modules = [module for module in modules if hasattr(vars(module).get("config"), "no_sync_func")]
    own = {id(config): without_training(config) for config in distinct_configs(modules)}
    for module in modules:
        module.config = own[id(module.config)]
    freeze(model, role, setting)


# --- the frameworks' set-up functions


def initialize_model_and_optimizer(call: Call) -> Any:
    """Run the function of slime or miles, which returns model chunks, optimizer, scheduler and iteration.

    For a role that only scores, the chunks are frozen, see :func:`freeze_role`, and there is no optimizer and
    no scheduler. A warning says where the framework has wrapped the model all the same.
    """
    framework_args, role = call["args"], call["role"]
    if role not in call.options.inference_roles:
        return call()
    options = {name: value for name, value in vars(framework_args).items() if name == _NO_OPTIMIZER}
    role_scope = inference_role(role, framework_args)
    with replaced(framework_args, **options), preserved_rng(), role_scope as current:
        model, optimizer, scheduler, iteration = call()
    if not current.ddp_skipped:
        _BUILT_FOR_TRAINING.log(role=role, reason=current.reason_skipped)
        return model, optimizer, scheduler, iteration
    freeze_role(model, role)
    return model, None, None, iteration


def set_up_for_evaluation(call: Call) -> Any:
    """Run ``setup_model_and_optimizer`` of slime or miles, without gradient buffers where it only evaluates.

    With ``--num-rollout 0`` they leave out the optimizer themselves. An fp32 model keeps DDP, since they
    expect a wrapper, DDP or ``Float16Module``, above the names under which they send weights.
    """
    framework_args, role = call["args"], call["role"]
    has_wrapper = framework_args.bf16 or framework_args.fp16
    if framework_args.num_rollout != 0 or not has_wrapper or _scope.get() is not None:
        return call()
    with inference_role(role) as current:
        model, optimizer, scheduler = call()
    if current.ddp_skipped:
        freeze_role(model, role, setting="--num-rollout 0")
    return model, optimizer, scheduler


def set_up_reference_state(call: Call) -> Any:
    """Return the reference's state dict on the CPU; NeMo-RL builds a model only to read it."""
    with inference_role("reference"):
        state_dict = call()
    gc.collect()  # the model has cycles
    torch.cuda.empty_cache()  # does nothing without CUDA
    return state_dict


def set_up_policy(call: Call) -> Any:
    """Run NeMo-RL's ``setup_model_and_optimizer``, without DDP where it makes no optimizer."""
    with nullcontext() if call["load_optimizer"] else inference_role("policy without optimizer"):
        return call()


def initialize_engine(call: Call) -> Any:
    """Run ``initialize`` of AReaL's engine, without DDP where its configuration has no optimizer."""
    engine, config = call.instance, call.instance.mcore_config
    # With these options the engine calls methods that only DDP chunks have.
    needs_ddp = config.disable_grad_buffers_cpu_backup or (
        config.ddp.overlap_param_gather and config.ddp.align_param_gather
    )
    sharded = config.use_torch_fsdp2 or config.use_custom_fsdp
    trains = engine.optimizer_config is not None or engine.config.use_lora
    if trains or needs_ddp or sharded or not config.wrap_with_ddp:
        return call()
    with replaced(config, wrap_with_ddp=False):
        result = call()
    freeze_role(engine.model, "reference", setting="the engine's configuration, which has no optimizer")
    return result


# --- what Megatron's functions do inside of inference_role()


def get_model(call: Call, args: Any = None) -> Sequence[torch.nn.Module]:
    """Build chunks, without DDP for a role that only scores; an explicit ``wrap_with_ddp=True`` is obeyed.

    ``args`` are Megatron's global arguments, where they also decide how chunks are wrapped.
    """
    current = _scope.get()
    if current is None:
        return call()
    passed = call.passed()
    if passed.get("wrap_with_ddp"):
        current.reason_skipped = "the framework passes wrap_with_ddp itself"
        return call()
    # Without the wrapper that shards them, every rank would hold all parameters.
    if sharded := [name for name in _SHARDED if passed.get(name) or getattr(args, name, None)]:
        current.reason_skipped = f"its parameters are sharded ({', '.join(sharded)})"
        return call()
    current.ddp_skipped = True
    if _NO_OPTIMIZER in getattr(current.framework_args, "__dict__", ()):
        setattr(current.framework_args, _NO_OPTIMIZER, True)
    return call(wrap_with_ddp=False)


def megatron_get_model(call: Call) -> Sequence[torch.nn.Module]:
    """:func:`get_model` of Megatron-LM, whose global arguments decide, too."""
    if _scope.get() is None:
        return call()
    from megatron.training.global_vars import get_args

    return get_model(call, get_args())


def get_megatron_optimizer(call: Call) -> Any:
    """Return an optimizer, or :class:`NullOptimizer` for a role that only scores.

    Outside of :func:`inference_role`, chunks that only score raise :class:`InferenceOnlyError`.
    """
    if ddp_skipped():
        return NullOptimizer()
    refuse_to_train(call["model_chunks"], "get_megatron_optimizer")
    return call()


def get_optimizer_param_scheduler(call: Call) -> Any:
    """Return a scheduler, or :class:`NullScheduler` for a role that only scores."""
    return NullScheduler() if ddp_skipped() else call()


def load_checkpoint(call: Call) -> Any:
    """Run Megatron's ``load_checkpoint``, which loads only the weights into a model that only scores.

    For such a model the loader runs as for fine-tuning (``--finetune --no-load-optim --no-load-rng``), which
    in every release keeps it from the optimizer, the generators and the rerun state machine, and from
    refusing another TP or PP size because of the optimizer. It then returns 0 for the iteration, which is
    read from the checkpoint. All globals that it touches are put back, also when it raises.

    Unlike ``load_inference_checkpoint`` the loader unpickles files, which may run code that they name.
    """
    if not ddp_skipped():
        return call()
    from megatron.training.global_vars import get_args

    args = get_args()
    with preserved_rng(), _preserved_globals(args):
        args.finetune = args.no_load_optim = args.no_load_rng = True
        for name in _CONSUMED:
            setattr(args, name, 0)
        iteration, num_operations = call(optimizer=None, opt_param_scheduler=None)
    return _stored_iteration(args, call["load_arg"]) or iteration, num_operations


def _stored_iteration(args: Any, load_arg: str) -> int:
    """Return the iteration in the checkpoint; 0 for sources that :func:`read_iteration` does not know."""
    for path in (getattr(args, load_arg), getattr(args, "pretrained_checkpoint", None)):
        with suppress(CheckpointError):
            if path is not None:
                return read_iteration(path, getattr(args, "ckpt_step", None))
    return 0


@contextmanager
def _preserved_globals(args: Any) -> Iterator[None]:
    """Leave arguments, microbatch calculator and checkpoint version as they are.

    Inside, the checkpoint version is unset, as the loader asserts that all checkpoints have the same one.
    """
    checkpointing = sys.modules.get("megatron.training.checkpointing")
    microbatches = sys.modules.get("megatron.core.num_microbatches_calculator")
    calculator = getattr(microbatches, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)
    unknown = {"_CHECKPOINT_VERSION": None} if hasattr(checkpointing, "_CHECKPOINT_VERSION") else {}
    before = [(vars(owner), dict(vars(owner))) for owner in (args, calculator) if owner is not None]
    try:
        with replaced(checkpointing, **unknown):
            yield
    finally:
        for attributes, values in before:
            attributes.clear()
            attributes.update(values)


def train(call: Call) -> Any:
    """Train; raise :class:`InferenceOnlyError` if the model only scores."""
    refuse_to_train(call["model"], "train")
    return call()


class NullOptimizer:
    """An optimizer without parameters; frameworks use this much of it before they return it."""

    is_stub_optimizer = True
    chained_optimizers: tuple[()] = ()
    param_groups: tuple[()] = ()

    def reload_model_params(self, *args: Any, **kwargs: Any) -> None: ...


class NullScheduler:
    """A scheduler without effect; OpenClaw-RL and miles advance it after loading."""

    num_steps = 0

    def step(self, increment: int = 0) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
