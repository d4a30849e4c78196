"""What every stand-in does in a step of training, Megatron-LM's included."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.pipeline_parallel import get_forward_backward_func

NO_SYNC = (
    "When overlap_grad_reduce is True, config.no_sync_func must be None; "
    "a custom no_sync_func is not supported when overlapping grad-reduce"
)


def install_sync_functions(config: Any, model: Sequence[DDP]) -> None:
    for name, method in (("no_sync_func", "no_sync"), ("grad_sync_func", "start_grad_sync")):
        functions = [getattr(model_chunk, method) for model_chunk in model]
        setattr(config, name, functions[0] if len(functions) == 1 else functions)


def should_disable_forward_pre_hook(args: Any) -> bool:
    return args.use_distributed_optimizer and args.overlap_param_gather


def enable_forward_pre_hook(model_chunks: Sequence[DDP]) -> None:
    for model_chunk in model_chunks:
        model_chunk.enable_forward_pre_hook()


def disable_forward_pre_hook(model_chunks: Sequence[DDP], param_sync: bool = True) -> None:
    for model_chunk in model_chunks:
        model_chunk.disable_forward_pre_hook(param_sync=param_sync)


def train_steps(args: Any, model: Sequence[DDP], steps: Sequence[Callable[[], object]]) -> None:
    """Take the steps; forward pre-hooks are on from the end of the first step to that of the last."""
    if args.manual_gc:
        gc.disable()
        gc.collect()
    if should_disable_forward_pre_hook(args):
        disable_forward_pre_hook(model, param_sync=False)
    for step_id, step in enumerate(steps):
        step()
        if step_id == 0 and should_disable_forward_pre_hook(args):
            enable_forward_pre_hook(model)
    if steps and should_disable_forward_pre_hook(args):
        disable_forward_pre_hook(model)


def zero_gradients(model: Sequence[DDP], optimizer: Any) -> None:
    for model_chunk in model:
        model_chunk.zero_grad_buffer()
    optimizer.zero_grad()


def run_microbatches(
    args: Any,
    forward_step_func: Any,
    data_iterator: Any,
    model: Sequence[DDP],
    num_microbatches: int,
    forward_only: bool = False,
    **options: Any,
) -> Any:
    """Call Megatron's schedule; ``args`` has the sizes of a microbatch."""
    return get_forward_backward_func()(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=forward_only,
        **options,
    )


def update(optimizer: Any, opt_param_scheduler: Any, samples: int) -> None:
    update_successful, _, _ = optimizer.step()
    assert update_successful
    opt_param_scheduler.step(increment=samples)
