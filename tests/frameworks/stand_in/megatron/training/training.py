"""In the shape of Megatron-LM's, core_v0.12 to 0.15.

``train`` leaves the interval timer running and the garbage collector off; a step goes through the rerun state
machine; saving stops the interval timer first and switches the forward pre-hooks off and on.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
from steps import (
    NO_SYNC,
    compute_gradients,
    disable_forward_pre_hook,
    enable_forward_pre_hook,
    install_sync_functions,
    should_disable_forward_pre_hook,
    train_steps,
    update,
)

from .checkpointing import save_checkpoint
from .global_vars import get_args, get_timers


def get_model(
    model_provider_func: Callable[..., Any],
    model_type: Any = ModelType.encoder_or_decoder,
    wrap_with_ddp: bool = True,
) -> list[Any]:
    args = get_args()
    args.model_type = model_type
    model = [model_provider_func(pre_process=True, post_process=True)]
    config = get_model_config(model[0])
    if args.fp16 or args.bf16:
        model = [Float16Module(config, model_module) for model_module in model]
    if wrap_with_ddp:
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=args.overlap_grad_reduce,
            overlap_param_gather=args.overlap_param_gather,
            use_distributed_optimizer=args.use_distributed_optimizer,
            bucket_size=args.ddp_bucket_size,
        )
        model = [DDP(config, ddp_config, model_module) for model_module in model]
    return model


def train_step(
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Sequence[DDP],
    optimizer: Any,
    opt_param_scheduler: Any,
    config: Any,
) -> None:
    args, timers = get_args(), get_timers()
    rerun_state_machine = get_rerun_state_machine()
    while rerun_state_machine.should_run_forward_backward(data_iterator):
        compute_gradients(forward_step_func, data_iterator, model, optimizer, args.num_microbatches)
    _, should_exit, _ = rerun_state_machine.should_checkpoint_and_exit()
    assert not should_exit

    timers("optimizer", log_level=1).start()
    update(optimizer, opt_param_scheduler, args.num_microbatches * args.micro_batch_size)
    timers("optimizer").stop()


def save_checkpoint_and_time(
    iteration: int,
    model: Sequence[DDP],
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    checkpointing_context: Any,
) -> None:
    args, timers = get_args(), get_timers()
    timers("interval-time").stop()
    timers("save-checkpoint", log_level=0).start()
    if should_disable_forward_pre_hook(args):
        disable_forward_pre_hook(model)
    save_checkpoint(iteration, model, optimizer, opt_param_scheduler)
    if should_disable_forward_pre_hook(args):
        enable_forward_pre_hook(model)
    timers("save-checkpoint").stop()
    timers("interval-time", log_level=0).start()


def train(
    forward_step_func: Callable[..., Any],
    model: Sequence[DDP],
    optimizer: Any,
    opt_param_scheduler: Any,
    train_data_iterator: Any,
    valid_data_iterator: Any,
    process_non_loss_data_func: Any,
    config: Any,
    checkpointing_context: Any,
    non_loss_data_func: Any,
) -> tuple[int, float]:
    args, timers = get_args(), get_timers()
    for model_module in model:
        model_module.train()
    get_rerun_state_machine().current_iteration = args.iteration

    config.grad_scale_func = optimizer.scale_loss
    config.timers = timers
    if isinstance(model[0], DDP) and args.overlap_grad_reduce:
        assert config.no_sync_func is None, NO_SYNC
        install_sync_functions(config, model)
    config.finalize_model_grads_func = finalize_model_grads

    timers("interval-time", log_level=0).start(barrier=True)
    state = model, optimizer, opt_param_scheduler, config
    step = partial(train_step, forward_step_func, train_data_iterator, *state)
    train_steps(args, model, [step] * (args.train_iters - args.iteration))
    return args.train_iters, 0.0
