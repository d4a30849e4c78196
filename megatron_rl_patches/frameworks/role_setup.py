"""The set-up functions of slime, miles, NeMo-RL and AReaL, for roles whose models only score."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from ..common.scopes import replaced, restore, snapshot
from .arguments import bind
from .inference_roles import freeze_role, in_inference_role, inference_role, initialize

_REFERENCE = "reference"
_WITHOUT_OPTIMIZER = "the engine's configuration, which has no optimizer"
# With this option miles builds no optimizer and no scheduler for any role.
_NO_OPTIMIZER = "debug_disable_optimizer"


def initialize_role(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``initialize_model_and_optimizer`` of slime or miles for a role that only scores."""
    arguments = bind(wrapped, args, kwargs, defaults=True).arguments
    framework_args = arguments["args"]
    before = snapshot(framework_args, _NO_OPTIMIZER)

    def leave_out_optimizer() -> None:
        if _NO_OPTIMIZER in vars(framework_args):
            setattr(framework_args, _NO_OPTIMIZER, True)

    try:
        return initialize(lambda: wrapped(*args, **kwargs), arguments["role"], leave_out_optimizer)
    finally:
        restore(framework_args, before)


def set_up_for_evaluation(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run slime's ``setup_model_and_optimizer``, without gradient buffers where it only evaluates.

    With ``--num-rollout 0`` slime itself leaves out the optimizer. An fp32 model keeps DDP, since
    slime expects a wrapper, DDP or ``Float16Module``, above the names under which it sends weights.
    """
    arguments = bind(wrapped, args, kwargs, defaults=True).arguments
    framework_args, role = arguments["args"], arguments["role"]
    has_wrapper = framework_args.bf16 or framework_args.fp16
    if framework_args.num_rollout != 0 or not has_wrapper or in_inference_role():
        return wrapped(*args, **kwargs)
    with inference_role(role) as current:
        model, optimizer, scheduler = wrapped(*args, **kwargs)
    if current.ddp_skipped:
        freeze_role(model, role, setting="--num-rollout 0")
    return model, optimizer, scheduler


def set_up_reference_state(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the reference's state dict on the CPU; NeMo-RL builds a model only to read it."""
    with inference_role(_REFERENCE):
        state_dict = wrapped(*args, **kwargs)
    gc.collect()  # the model has cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return state_dict


def set_up_policy(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run NeMo-RL's ``setup_model_and_optimizer``, without DDP where it makes no optimizer."""
    if bind(wrapped, args, kwargs, defaults=True).arguments["load_optimizer"]:
        return wrapped(*args, **kwargs)
    with inference_role("policy without optimizer"):
        return wrapped(*args, **kwargs)


def initialize_engine(wrapped: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``initialize`` of AReaL's engine, without DDP where its configuration has no optimizer."""
    config = engine.mcore_config
    # With these options the engine calls methods that only DDP chunks have.
    needs_ddp = config.disable_grad_buffers_cpu_backup or (
        config.ddp.overlap_param_gather and config.ddp.align_param_gather
    )
    sharded = config.use_torch_fsdp2 or config.use_custom_fsdp
    trains = engine.optimizer_config is not None or engine.config.use_lora
    if trains or needs_ddp or sharded or not config.wrap_with_ddp:
        return wrapped(*args, **kwargs)
    with replaced(config, wrap_with_ddp=False):
        result = wrapped(*args, **kwargs)
    freeze_role(engine.model, _REFERENCE, setting=_WITHOUT_OPTIMIZER)
    return result
