"""In the shape of Megatron-Bridge's: relies on installed sync functions, leaves its timer running."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_model_config


def train(
    forward_step_func: Callable[..., Any],
    model: Sequence[DDP],
    optimizer: Any,
    scheduler: Any,
    train_data_iterator: Any,
    valid_data_iterator: Any,
    global_state: SimpleNamespace,
    checkpoint_manager: Any,
    pg_collection: Any,
    process_non_loss_data_func: Any = None,
    non_loss_data_func: Any = None,
    callback_manager: Any = None,
) -> None:
    config, timers, train_state = global_state.cfg, global_state.timers, global_state.train_state
    model_config = get_model_config(model[0])
    for model_module in model:
        model_module.train()
    get_rerun_state_machine().current_iteration = train_state.step

    timers("interval-time", log_level=0).start(barrier=True)
    pre_hook_enabled = False
    if config.train.manual_gc:
        gc.disable()
        gc.collect()

    start_iteration = train_state.step
    should_toggle_forward_pre_hook = should_disable_forward_pre_hook(config.ddp)
    if should_toggle_forward_pre_hook:
        param_sync_func = model_config.param_sync_func
        disable_forward_pre_hook(model, param_sync=False)
        model_config.param_sync_func = None

    while train_state.step < config.train.train_iters:
        train_step(forward_step_func, train_data_iterator, model, optimizer, scheduler, config)
        if train_state.step == start_iteration and should_toggle_forward_pre_hook:
            enable_forward_pre_hook(model)
            model_config.param_sync_func = param_sync_func
            pre_hook_enabled = True
        train_state.step += 1

    if pre_hook_enabled:
        disable_forward_pre_hook(model, optimizer=optimizer)


def train_step(
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Sequence[DDP],
    optimizer: Any,
    scheduler: Any,
    config: SimpleNamespace,
) -> None:
    rerun_state_machine = get_rerun_state_machine()
    while rerun_state_machine.should_run_forward_backward(data_iterator):
        for model_chunk in model:
            model_chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=config.train.num_microbatches,
            seq_length=config.train.seq_length,
            micro_batch_size=config.train.micro_batch_size,
            forward_only=False,
        )
    _, should_exit, _ = rerun_state_machine.should_checkpoint_and_exit()
    assert not should_exit
    update_successful, _, _ = optimizer.step()
    assert update_successful
    scheduler.step(increment=config.train.num_microbatches * config.train.micro_batch_size)


def should_disable_forward_pre_hook(ddp_config: Any) -> bool:
    return ddp_config.use_distributed_optimizer and ddp_config.overlap_param_gather


def enable_forward_pre_hook(model: Sequence[DDP]) -> None:
    for model_chunk in model:
        model_chunk.enable_forward_pre_hook()


def disable_forward_pre_hook(model: Sequence[DDP], optimizer: Any = None, param_sync: bool = True) -> None:
    for model_chunk in model:
        model_chunk.disable_forward_pre_hook(param_sync=param_sync)
