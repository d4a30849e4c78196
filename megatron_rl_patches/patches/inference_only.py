"""Roles that only score get a model without DDP, gradient buffers, optimizer and scheduler.

What happens for such a role is in :mod:`..frameworks.inference_roles`.

Not patched: frameworks that build such a model already (verl, SkyRL, ROLL, ms-swift), references and teachers
whose weights slime and miles swap into the actor's model (there is no second one), adapters (LoRA) of miles,
which its bridge wraps itself, models whose parameters FSDP shards, and Megatron-LM's own set-up: it passes
``wrap_with_ddp`` to a model builder, and leaves out DDP and the optimizer with ``--skip-train``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.patch import Patch
from ..engine.target_source import TargetSource
from ..frameworks import megatron_utils

_MODELS = megatron_utils("model")
_BUILDERS = ("initialize_model_and_optimizer", "setup_model_and_optimizer")


@dataclass(frozen=True)
class InferenceOnlyOptions:
    """Options of the patch.

    Attributes:
        inference_roles: roles of a framework whose models only score: they get no DDP and no optimizer.
    """

    inference_roles: tuple[str, ...] = ("prm_teacher", "teacher", "ref", "reward")


# --- when a site is left alone: judged from the target's code


def _framework_leaves_ddp_out(target: TargetSource) -> str | None:
    if target.parameters == {"args"}:
        return "it builds one model, and that one trains"
    builds_without = any(call.keywords.get("wrap_with_ddp") is False for call in target.calls(in_module=True))
    # slime before v0.2 calls `get_model` without DDP, and wraps the model itself.
    wraps = any(target.calls(name, in_module=True) for name in ("DDP", "DistributedDataParallel"))
    has_own = builds_without and not wraps
    return "the framework has a way of its own to build a model without DDP" if has_own else None


def _passes_wrap_with_ddp(target: TargetSource) -> str | None:
    builds = target.calls("get_model")
    passes = builds and all("wrap_with_ddp" in call.keywords for call in builds)
    return "it passes wrap_with_ddp itself" if passes else None


# --- sites

patch = Patch(
    name="inference-only",
    summary="models that only score get no DDP, no gradient buffers and no optimizer",
    upstream=("Gen-Verse/OpenClaw-RL#115", "NVIDIA-NeMo/RL#3697", "THUDM/slime#2296"),
    options=InferenceOnlyOptions,
)

patch.wrap(
    _MODELS,
    "initialize_model_and_optimizer",
    ".frameworks.inference_roles:initialize_model_and_optimizer",
    parameters=("args", "role"),
    skip_if=_framework_leaves_ddp_out,
)
patch.wrap(
    _MODELS,
    "get_optimizer_param_scheduler",
    ".frameworks.inference_roles:get_optimizer_param_scheduler",
    helps=_BUILDERS,
)
patch.wrap(_MODELS, "train", ".frameworks.inference_roles:train", parameters=("model",), helps=_BUILDERS)
patch.wrap(
    _MODELS,
    "setup_model_and_optimizer",
    ".frameworks.inference_roles:set_up_for_evaluation",
    parameters=("args", "role"),
    skip_if=lambda code: None if code.mentions("num_rollout") else "it has no evaluation-only branch",
)
for _module, _builds in (
    ("training", "get_model"),
    ("models.gpt", "GPTModelBuilder.build_distributed_models"),
    ("models.hybrid", "HybridModelBuilder.build_distributed_models"),
):
    patch.wrap(
        f"megatron.training.{_module}",
        _builds,
        ".frameworks.inference_roles:megatron_get_model",
        parameters=("wrap_with_ddp",),
        optional_module=_builds != "get_model",
    )
patch.wrap(
    "megatron.training.checkpointing",
    "load_checkpoint",
    ".frameworks.inference_roles:load_checkpoint",
    parameters=("optimizer", "opt_param_scheduler", "load_arg"),
    requires_names=("finetune", "no_load_optim", "no_load_rng"),
)
patch.wrap(
    "megatron.core.optimizer",
    "get_megatron_optimizer",
    ".frameworks.inference_roles:get_megatron_optimizer",
    parameters=("model_chunks",),
)
patch.wrap(
    "megatron.bridge.models.model_provider",
    "get_model",
    ".frameworks.inference_roles:get_model",
    parameters=("wrap_with_ddp",),
)
_NEMO_RL: dict[str, tuple[str, tuple[str, ...]]] = {
    "setup_reference_model_state": ("set_up_reference_state", ()),
    "setup_model_and_optimizer": ("set_up_policy", ("load_optimizer",)),
}
for _function, (_adapter, _parameters) in _NEMO_RL.items():
    patch.wrap(
        "nemo_rl.models.megatron.setup",
        _function,
        f".frameworks.inference_roles:{_adapter}",
        parameters=_parameters,
        requires_names=("get_model",),
        skip_if=_passes_wrap_with_ddp,
    )
patch.wrap(
    "areal.engine.megatron_engine",
    "MegatronEngine.initialize",
    ".frameworks.inference_roles:initialize_engine",
    requires_names=("make_mcore_model", "mcore_config"),
    skip_if=lambda code: "the engine decides about DDP itself" if code.mentions("wrap_with_ddp") else None,
)
