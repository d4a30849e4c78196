"""What collectives have done, or have left to do, for a bucket group of Megatron's DDP."""

from __future__ import annotations

from typing import Any


def is_stale(group: Any) -> bool:
    """Return whether the parameters of this bucket group have not been gathered since the last step."""
    is_alone = getattr(group, "intra_distributed_optimizer_instance_size", 0) == 1
    if is_alone or not group.ddp_config.overlap_param_gather:
        return False
    return group.param_gather_handle is not None or not group.param_gather_dispatched


def data_parallel_size(group: Any) -> int:
    """Return how many data-parallel ranks reduce the gradients of a bucket group."""
    name = "intra_distributed_optimizer_instance_group"
    process_group = getattr(group, name, None) or getattr(group, "data_parallel_group", None)
    return int(process_group.size()) if process_group is not None else 1


def is_unreduced(group: Any, if_unknown: bool) -> bool:
    """Return whether the gradients of a bucket group have not been reduced before a step.

    A reduction that overlaps with backward leaves a handle, until somebody waits for it. One of the
    distributed optimizer's leaves shards of the buffer from the first step on. Others leave no trace.
    """
    if group.grad_reduce_handle is not None:
        return True
    shards = getattr(group, "cached_grad_buffer_shard_list", None)
    if group.ddp_config.use_distributed_optimizer and shards is not None:
        return all(shard is None for shard in shards)
    return if_unknown
