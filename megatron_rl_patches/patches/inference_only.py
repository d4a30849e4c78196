"""Roles that only score get a model without DDP, gradient buffers, optimizer and scheduler.

Not patched: hosts that build such a model already (verl, SkyRL, ROLL, ms-swift), references and teachers
whose weights slime and miles swap into the actor's model (there is no second one), adapters (LoRA) of miles,
which its bridge wraps itself, and models whose parameters FSDP shards.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..engine.arguments import bind
from ..engine.spec import Patch

if TYPE_CHECKING:
    from ..engine.facts import Facts
    from ..settings import Settings

_TRAINING = "megatron.training"
_REFERENCE = "reference"


# --- not needed: judged from the target's code


def _keyword(tree: ast.AST | None, name: str, *values: object) -> bool:
    """Does any call in the tree pass the keyword (with one of these constants, where there are any)?"""
    return tree is not None and any(
        keyword.arg == name
        and (not values or (isinstance(keyword.value, ast.Constant) and keyword.value.value in values))
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
    )


def _host_leaves_ddp_out(facts: Facts) -> str | None:
    has_own = _keyword(facts.module, "wrap_with_ddp", False)
    return "the host has a way of its own to build a model without DDP" if has_own else None


def _has_no_evaluation_branch(facts: Facts) -> str | None:
    return None if "num_rollout" in facts.names else "it has no evaluation-only branch"


def _says_whether_to_wrap(facts: Facts) -> str | None:
    says = _keyword(facts.function, "wrap_with_ddp")
    return "it says itself whether the model is wrapped in DDP" if says else None


def _engine_knows_ddp(facts: Facts) -> str | None:
    return "the engine decides about DDP itself" if "wrap_with_ddp" in facts.module_names else None


def _takes_wrap_with_ddp(facts: Facts) -> str | None:
    taken = "wrap_with_ddp" in facts.parameters
    return "its workers ask for a model without DDP where nothing is trained" if taken else None


def _builds_without_ddp(facts: Facts) -> str | None:
    without = _keyword(facts.function, "wrap_with_ddp", False)
    return "its reference model is built without DDP" if without else None


def _builds_untrainable(facts: Facts) -> str | None:
    untrainable = _keyword(facts.function, "is_trainable", False)
    return "its inference strategy builds a model that is not trainable" if untrainable else None


def _swaps_weights(facts: Facts) -> str | None:
    swaps = "weights_backuper" in facts.names
    return "reference and teacher are weights swapped into the actor's model, not models" if swaps else None


# --- adapters


def _initialize(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, settings: Settings
) -> Any:
    bound = bind(wrapped, args, kwargs, defaults=True).arguments
    host_args, role = bound["args"], bound["role"]
    if role not in settings.inference_roles:
        return wrapped(*args, **kwargs)
    from ..inference.roles import initialize

    # miles has a switch of its own that leaves out optimizer and scheduler, of whatever kind.
    with _restored(host_args, "debug_disable_optimizer") as switch_on:
        return initialize(lambda: wrapped(*args, **kwargs), role, when_built=switch_on)


@contextmanager
def _restored(owner: Any, name: str) -> Iterator[Callable[[], None]]:
    """Gives a function that sets the attribute, if there is one, until the end of the block."""
    before = vars(owner).get(name)
    try:
        yield lambda: setattr(owner, name, True) if name in vars(owner) else None
    finally:
        if name in vars(owner):
            setattr(owner, name, before)


def _scheduler(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from ..inference.roles import scheduler

    return scheduler(lambda: wrapped(*args, **kwargs))


def _train(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from ..inference.untrainable import refuse_to_train

    refuse_to_train(bind(wrapped, args, kwargs).arguments["model"], "train")
    return wrapped(*args, **kwargs)


def _untouched(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a site that only tells; never in place."""
    return wrapped(*args, **kwargs)


# --- sites

patch = Patch(
    name="inference-only",
    summary="roles that only score get no DDP, no gradient buffers, no optimizer",
    upstream=("Gen-Verse/OpenClaw-RL#115", "NVIDIA-NeMo/RL#3697", "THUDM/slime#2296"),
)

for _host in ("slime", "miles"):  # OpenClaw-RL vendors slime under its own name
    _module = f"{_host}.backends.megatron_utils.model"
    patch.wrap(
        _module,
        "initialize_model_and_optimizer",
        uses=("args", "role"),
        not_needed=_host_leaves_ddp_out,
        with_settings=True,
    )(_initialize)
    patch.wrap(_module, "get_optimizer_param_scheduler", not_needed=_host_leaves_ddp_out)(_scheduler)
    patch.wrap(_module, "train", uses=("model",))(_train)
    patch.wrap(
        f"{_host}.backends.megatron_utils.actor",
        "MegatronTrainRayActor.load_other_checkpoint",
        not_needed=_swaps_weights,
        only_tells=True,
    )(_untouched)


@patch.wrap(
    "slime.backends.megatron_utils.model",
    "setup_model_and_optimizer",
    uses=("args", "role"),
    not_needed=_has_no_evaluation_branch,
)
def slime_setup(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Evaluation only (``--num-rollout 0``): slime leaves out the optimizer, but not the gradient buffers."""
    bound = bind(wrapped, args, kwargs, defaults=True).arguments
    host_args, role = bound["args"], bound["role"]
    from ..inference import roles

    # The names that weights are sent under count on one wrapper at least: DDP, or the one for 16 bits.
    if host_args.num_rollout != 0 or not (host_args.bf16 or host_args.fp16) or roles.is_building():
        return wrapped(*args, **kwargs)
    with roles.building(role) as scope:
        model, optimizer, scheduler = wrapped(*args, **kwargs)
    if scope.built:
        roles.retire(model, role, setting="--num-rollout 0")
    return model, optimizer, scheduler


@patch.wrap(
    f"{_TRAINING}.training",
    "get_model",
    uses=("wrap_with_ddp",),
    copied_by=("slime", "miles"),
)
def megatron_get_model(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from ..inference import roles

    if not roles.is_building():
        return wrapped(*args, **kwargs)
    from megatron.training.global_vars import get_args

    return roles.get_model(wrapped, bind(wrapped, args, kwargs), get_args())


@patch.wrap(
    f"{_TRAINING}.checkpointing",
    "load_checkpoint",
    uses=("optimizer", "opt_param_scheduler", "load_arg"),
    mentions=("finetune", "no_load_optim", "no_load_rng"),
    copied_by=("slime", "miles"),
)
def megatron_load_checkpoint(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from ..inference import roles

    if not roles.is_built():
        return wrapped(*args, **kwargs)
    from megatron.training.global_vars import get_args

    from ..inference.role_loading import load_checkpoint

    return load_checkpoint(wrapped, bind(wrapped, args, kwargs, defaults=True), get_args())


@patch.wrap(
    "megatron.core.optimizer",
    "get_megatron_optimizer",
    uses=("model_chunks",),
    copied_by=("slime", "miles"),
)
def get_megatron_optimizer(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from ..inference.roles import optimizer

    model = bind(wrapped, args, kwargs).arguments["model_chunks"]
    return optimizer(lambda: wrapped(*args, **kwargs), model)


@patch.wrap(
    "megatron.bridge.models.model_provider",
    "get_model",
    uses=("wrap_with_ddp",),
    copied_by=("nemo_rl",),
)
def bridge_get_model(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Bridge itself asks for what it needs; NeMo-RL, for its reference model, does not."""
    from ..inference import roles

    if not roles.is_building():
        return wrapped(*args, **kwargs)
    return roles.get_model(wrapped, bind(wrapped, args, kwargs))


@patch.wrap(
    "nemo_rl.models.megatron.setup",
    "setup_reference_model_state",
    mentions=("get_model",),
    not_needed=_says_whether_to_wrap,
)
def nemo_rl_reference(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A model is built only to read its state dict, which comes back on the CPU."""
    import torch

    from ..inference.roles import building

    with building(_REFERENCE):
        state_dict = wrapped(*args, **kwargs)
    gc.collect()  # the model has cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return state_dict


@patch.wrap(
    "nemo_rl.models.megatron.setup",
    "setup_model_and_optimizer",
    uses=("load_optimizer",),
    mentions=("get_model",),
    not_needed=_says_whether_to_wrap,
)
def nemo_rl_setup(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if bind(wrapped, args, kwargs, defaults=True).arguments["load_optimizer"]:
        return wrapped(*args, **kwargs)
    from ..inference.roles import building

    with building("policy without optimizer"):
        return wrapped(*args, **kwargs)


@patch.wrap(
    "areal.engine.megatron_engine",
    "MegatronEngine.initialize",
    mentions=("make_mcore_model", "mcore_config"),
    not_needed=_engine_knows_ddp,
)
def areal_initialize(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``make_mcore_model`` is not told whether there is an optimizer; the engine that calls it knows."""
    config = instance.mcore_config
    # Without DDP these would fail: the engine calls methods of DDP chunks for them.
    needs_ddp = config.disable_grad_buffers_cpu_backup or (
        config.ddp.overlap_param_gather and config.ddp.align_param_gather
    )
    sharded = config.use_torch_fsdp2 or config.use_custom_fsdp
    trains = instance.optimizer_config is not None or instance.config.use_lora
    if trains or needs_ddp or sharded or not config.wrap_with_ddp:
        return wrapped(*args, **kwargs)
    from ..inference.roles import retire

    config.wrap_with_ddp = False
    try:
        result = wrapped(*args, **kwargs)
    finally:
        config.wrap_with_ddp = True
    retire(instance.model, _REFERENCE, setting="the engine's configuration, which has no optimizer")
    return result


# Hosts without work for the patch.
for _module, _qualname, _reason in (
    ("verl.utils.megatron_utils", "get_model", _takes_wrap_with_ddp),
    (
        "skyrl.backends.skyrl_train.workers.megatron.megatron_worker",
        "MegatronRefWorkerBase.init_model",
        _builds_without_ddp,
    ),
    ("roll.distributed.strategy.megatron_strategy", "MegatronInferStrategy.initialize", _builds_untrainable),
    (
        "swift.megatron.trainers.rlhf_mixin",
        "MegatronRLHFTrainer.setup_model_and_optimizer",
        _builds_without_ddp,
    ),
):
    patch.wrap(_module, _qualname, not_needed=_reason, only_tells=True)(_untouched)
