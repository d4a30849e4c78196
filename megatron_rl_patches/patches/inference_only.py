"""Roles that only score get a model without DDP, gradient buffers, optimizer and scheduler.

=============  ==================================  ===========================  ===========================
framework      function                            for a role that only scores  left alone when
=============  ==================================  ===========================  ===========================
slime, miles   ``initialize_model_and_optimizer``  no optimizer, no scheduler   can build without DDP
slime, miles   ``get_optimizer_param_scheduler``   ``NullScheduler``            can build without DDP
slime, miles   ``train``                           refuses
slime          ``setup_model_and_optimizer``       ``--num-rollout 0``: no DDP  has no evaluation-only mode
Megatron-LM    ``get_model``                       no DDP
Megatron-LM    ``load_checkpoint``                 loads the weights alone
megatron-core  ``get_megatron_optimizer``          ``NullOptimizer``
Bridge         ``get_model``                       no DDP
NeMo-RL        ``setup_reference_model_state``     no DDP                       passes wrap_with_ddp
NeMo-RL        ``setup_model_and_optimizer``       no optimizer: no DDP         passes wrap_with_ddp
AReaL          ``MegatronEngine.initialize``       no optimizer: no DDP         decides about DDP
=============  ==================================  ===========================  ===========================

vime has slime's modules under its own name, and OpenClaw-RL vendors slime under slime's. What happens for
such a role is in :mod:`..frameworks.inference_roles`, :mod:`..frameworks.role_setup` and
:mod:`..frameworks.role_checkpoints`.

Not patched: frameworks that build such a model already (verl, SkyRL, ROLL, ms-swift), references and teachers
whose weights slime and miles swap into the actor's model (there is no second one), adapters (LoRA) of miles,
which its bridge wraps itself, and models whose parameters FSDP shards.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engine.spec import Patch
from ..frameworks import SLIME_LIKE, WITH_MEGATRON_UTILS
from ..frameworks.arguments import bind, calls

if TYPE_CHECKING:
    from ..engine.target_source import TargetSource

_TRAINING = "megatron.training"
_NEMO_RL = "nemo_rl.models.megatron.setup"


@dataclass(frozen=True)
class InferenceOnlyOptions:
    """Options of the patch.

    Attributes:
        inference_roles: roles of a framework whose models only score: built with neither DDP nor optimizer.
    """

    inference_roles: tuple[str, ...] = ("prm_teacher", "teacher", "ref", "reward")


# --- when a site is left alone: judged from the target's code


def _keyword(tree: ast.AST | None, name: str, *values: object) -> bool:
    """Return whether any call passes the keyword; if values are named, with one of these constants."""
    return tree is not None and any(
        keyword.arg == name
        and (not values or (isinstance(keyword.value, ast.Constant) and keyword.value.value in values))
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
    )


def _framework_leaves_ddp_out(target: TargetSource) -> str | None:
    has_own = _keyword(target.module, "wrap_with_ddp", False)
    return "the framework has a way of its own to build a model without DDP" if has_own else None


def _has_no_evaluation_branch(target: TargetSource) -> str | None:
    return None if "num_rollout" in target.names else "it has no evaluation-only branch"


def _passes_wrap_with_ddp(target: TargetSource) -> str | None:
    passes = _keyword(target.function, "wrap_with_ddp")
    return "it passes wrap_with_ddp itself" if passes else None


def _engine_knows_ddp(target: TargetSource) -> str | None:
    return "the engine decides about DDP itself" if "wrap_with_ddp" in target.module_names else None


# --- adapters


def _initialize(
    wrapped: Any,
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    options: InferenceOnlyOptions,
) -> Any:
    if bind(wrapped, args, kwargs, defaults=True).arguments["role"] not in options.inference_roles:
        return wrapped(*args, **kwargs)
    from ..frameworks import role_setup

    return role_setup.initialize_role(wrapped, args, kwargs)


def _scheduler(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from ..frameworks import inference_roles

    return inference_roles.scheduler(lambda: wrapped(*args, **kwargs))


def _train(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from ..inference.models.refusal import refuse_to_train

    refuse_to_train(bind(wrapped, args, kwargs).arguments["model"], "train")
    return wrapped(*args, **kwargs)


# --- sites

patch = Patch(
    name="inference-only",
    summary="roles that only score get no DDP, no gradient buffers, no optimizer",
    upstream=("Gen-Verse/OpenClaw-RL#115", "NVIDIA-NeMo/RL#3697", "THUDM/slime#2296"),
    options=InferenceOnlyOptions,
)

for _framework in WITH_MEGATRON_UTILS:
    _module = f"{_framework}.backends.megatron_utils.model"
    patch.wrap(
        _module,
        "initialize_model_and_optimizer",
        parameters=("args", "role"),
        skip_if=_framework_leaves_ddp_out,
        pass_options=True,
    )(_initialize)
    patch.wrap(_module, "get_optimizer_param_scheduler", skip_if=_framework_leaves_ddp_out)(_scheduler)
    patch.wrap(_module, "train", parameters=("model",))(_train)


for _framework in SLIME_LIKE:
    patch.wrap(
        f"{_framework}.backends.megatron_utils.model",
        "setup_model_and_optimizer",
        parameters=("args", "role"),
        skip_if=_has_no_evaluation_branch,
    )(calls("role_setup.set_up_for_evaluation"))


@patch.wrap(
    f"{_TRAINING}.training",
    "get_model",
    parameters=("wrap_with_ddp",),
)
def megatron_get_model(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from ..frameworks import inference_roles

    if not inference_roles.in_inference_role():
        return wrapped(*args, **kwargs)
    from megatron.training.global_vars import get_args

    return inference_roles.get_model(wrapped, bind(wrapped, args, kwargs), get_args())


@patch.wrap(
    f"{_TRAINING}.checkpointing",
    "load_checkpoint",
    parameters=("optimizer", "opt_param_scheduler", "load_arg"),
    requires_names=("finetune", "no_load_optim", "no_load_rng"),
)
def megatron_load_checkpoint(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from ..frameworks import inference_roles

    if not inference_roles.ddp_skipped():
        return wrapped(*args, **kwargs)
    from megatron.training.global_vars import get_args

    from ..frameworks import role_checkpoints

    return role_checkpoints.load_weights(wrapped, bind(wrapped, args, kwargs, defaults=True), get_args())


@patch.wrap(
    "megatron.core.optimizer",
    "get_megatron_optimizer",
    parameters=("model_chunks",),
)
def get_megatron_optimizer(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from ..frameworks import inference_roles

    model = bind(wrapped, args, kwargs).arguments["model_chunks"]
    return inference_roles.optimizer(lambda: wrapped(*args, **kwargs), model)


@patch.wrap(
    "megatron.bridge.models.model_provider",
    "get_model",
    parameters=("wrap_with_ddp",),
)
def bridge_get_model(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from ..frameworks import inference_roles

    return inference_roles.get_model(wrapped, bind(wrapped, args, kwargs))


patch.wrap(
    _NEMO_RL, "setup_reference_model_state", requires_names=("get_model",), skip_if=_passes_wrap_with_ddp
)(calls("role_setup.set_up_reference_state"))

patch.wrap(
    _NEMO_RL,
    "setup_model_and_optimizer",
    parameters=("load_optimizer",),
    requires_names=("get_model",),
    skip_if=_passes_wrap_with_ddp,
)(calls("role_setup.set_up_policy"))


@patch.wrap(
    "areal.engine.megatron_engine",
    "MegatronEngine.initialize",
    requires_names=("make_mcore_model", "mcore_config"),
    skip_if=_engine_knows_ddp,
)
def areal_initialize(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from ..frameworks import role_setup

    return role_setup.initialize_engine(wrapped, instance, *args, **kwargs)
