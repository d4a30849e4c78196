"""What every stand-in does in a step of training, Megatron-LM's included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.pipeline_parallel import get_forward_backward_func

NO_SYNC = (
    "When overlap_grad_reduce is True, config.no_sync_func must be None; "
    "a custom no_sync_func is not supported when overlapping grad-reduce"
)


def install_sync_functions(config: Any, model: Sequence[DDP]) -> None:
    config.no_sync_func = one_or_all([model_chunk.no_sync for model_chunk in model])
    config.grad_sync_func = one_or_all([model_chunk.start_grad_sync for model_chunk in model])


def one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


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
