"""The set-up functions of slime, miles, NeMo-RL and AReaL, for roles whose models only score."""

from __future__ import annotations

import gc
from typing import Any

import torch

from ..common.scopes import replaced, restore, snapshot
from ..engine.call import Call
from .inference_roles import freeze_role, in_inference_role, inference_role, initialize

_REFERENCE = "reference"
_WITHOUT_OPTIMIZER = "the engine's configuration, which has no optimizer"
# With this option miles builds no optimizer and no scheduler for any role.
_NO_OPTIMIZER = "debug_disable_optimizer"


def initialize_role(call: Call) -> Any:
    """Run ``initialize_model_and_optimizer`` of slime or miles, for a role that only scores or another."""
    if call["role"] not in call.options.inference_roles:
        return call()
    framework_args = call["args"]
    before = snapshot(framework_args, _NO_OPTIMIZER)

    def leave_out_optimizer() -> None:
        if _NO_OPTIMIZER in vars(framework_args):
            setattr(framework_args, _NO_OPTIMIZER, True)

    try:
        return initialize(call, call["role"], leave_out_optimizer)
    finally:
        restore(framework_args, before)


def set_up_for_evaluation(call: Call) -> Any:
    """Run slime's ``setup_model_and_optimizer``, without gradient buffers where it only evaluates.

    With ``--num-rollout 0`` slime itself leaves out the optimizer. An fp32 model keeps DDP, since
    slime expects a wrapper, DDP or ``Float16Module``, above the names under which it sends weights.
    """
    framework_args, role = call["args"], call["role"]
    has_wrapper = framework_args.bf16 or framework_args.fp16
    if framework_args.num_rollout != 0 or not has_wrapper or in_inference_role():
        return call()
    with inference_role(role) as current:
        model, optimizer, scheduler = call()
    if current.ddp_skipped:
        freeze_role(model, role, setting="--num-rollout 0")
    return model, optimizer, scheduler


def set_up_reference_state(call: Call) -> Any:
    """Return the reference's state dict on the CPU; NeMo-RL builds a model only to read it."""
    with inference_role(_REFERENCE):
        state_dict = call()
    gc.collect()  # the model has cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return state_dict


def set_up_policy(call: Call) -> Any:
    """Run NeMo-RL's ``setup_model_and_optimizer``, without DDP where it makes no optimizer."""
    if call["load_optimizer"]:
        return call()
    with inference_role("policy without optimizer"):
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
    freeze_role(engine.model, _REFERENCE, setting=_WITHOUT_OPTIMIZER)
    return result
