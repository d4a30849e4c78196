"""What an exception in the middle of a training step leaves behind, and how the next call copes.

``recover`` runs in the exception handler and uses no collective: on other ranks the step may have gone well.
``synchronize_interrupted`` runs at the next entry, which all ranks reach, and gathers the parameters again.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
import types
import weakref
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from ..common.chunks import Chunk, Model, bucket_groups
from ..common.messages import Message
from ..common.text import one_line
from ..errors import MegatronRLPatchesError
from .forward_pre_hooks import synchronize
from .running_calls import check_memory

_NOT_RECOVERED = Message(
    "recovering a bucket group failed after an exception in train(): {failure}",
    "Another train() in this process may fail or hang.",
    "Find the cause in that exception, and restart the process.",
)
_interrupted: weakref.WeakSet[Any] = weakref.WeakSet()
_process_group_of = attrgetter("intra_distributed_optimizer_instance_group")

# Generators that switch off DDP's gradient reduction: no_sync of DDP, and the schedule's for several chunks.
_NO_SYNC_GENERATORS = frozenset({"no_sync", "multi_no_sync"})


def recover(model: Model, error: BaseException) -> None:
    """Make the chunks re-enterable after ``error`` escaped from a training step.

    Wait for the collectives that are in flight, clear their handles, drop gradients that were on their way
    into the gradient buffer and reset the bucket groups. Parameters are not touched; the chunks are marked
    for :func:`synchronize_interrupted`. A bucket group whose recovery fails is logged, since the caller has
    to see ``error``.

    If a peer never dispatched its part of a collective, gloo waits up to the process group's timeout, and
    raises. With NCCL the CUDA stream alone waits: this function returns, and after the timeout the watchdog
    of NCCL ends the process.
    """
    # The chunks are marked first, because a second Ctrl-C may interrupt the waiting below.
    _interrupted.update(model)
    _close_abandoned_no_sync(error)
    for chunk in model:
        _reset_bucket_groups(chunk)


def synchronize_interrupted(model: Model, optimizer: Any = None) -> None:
    """Gather the parameters, before the first forward of a call, if a former call broke off on some rank.

    With overlapped all-gather of parameters this is a collective: the ranks that share a bucket group agree
    by one all-reduce of one integer, and gather the parameters if any of them was interrupted. Without
    overlap nothing runs unless this rank was interrupted before the all-gather of a step, and then no other
    rank of the group can have completed that all-gather.

    Raises:
        MegatronRLPatchesError: parameters must be gathered through the gradient buffer (mxfp8), and the
            optimizer is missing or cannot copy them there; or their memory is freed.
    """
    for chunk in model:
        interrupted = chunk in _interrupted
        if interrupted:  # the recovery may have been interrupted, too
            _reset_bucket_groups(chunk)
        # From 0.17 on the layer-wise optimizer overlaps without use_distributed_optimizer.
        if getattr(chunk, "use_forward_hook", False):
            groups = bucket_groups(chunk)
            for process_group in dict.fromkeys(map(_process_group_of, groups)):  # experts have another one
                if _any_rank_was(interrupted, process_group, groups):
                    _interrupted.add(chunk)  # stays marked until the gather is done
                    check_memory(chunk)
                    fill_mxfp8_gather_buffer(chunk, optimizer)
                    _gather_parameters([g for g in groups if _process_group_of(g) is process_group])
        elif interrupted:
            check_memory(chunk)
            synchronize(chunk)
    _interrupted.difference_update(model)


def _reset_bucket_groups(chunk: Chunk) -> None:
    for group in bucket_groups(chunk):
        try:
            _reset_bucket_group(group)
        except Exception as failure:
            _NOT_RECOVERED.log(failure=one_line(failure))


def _reset_bucket_group(group: Any) -> None:
    try:
        # Several optimizer instances reduce gradients on a stream of their own, and then there is no handle.
        if (stream := getattr(group, "communication_stream", None)) is not None:
            import torch

            torch.cuda.current_stream().wait_stream(stream)
        if group.param_gather_handle is not None:
            # Waiting is not enough: fp8 post-processing and mxfp8 copies follow an all-gather.
            group.finish_param_sync(skip_next_bucket_dispatch=True)
        if group.grad_reduce_handle is not None:
            group.grad_reduce_handle.wait()
    finally:
        group.param_gather_handle = group.grad_reduce_handle = None
        for parameter in group.params:
            # An exception between autograd and the hook that adds the gradient to the buffer leaves it here,
            # and the next backward would add to it. The optimizer clears it only for this rank's shard.
            parameter.grad = None
        if getattr(group, "is_first_batch", False):
            # From 0.16 on reset() would take the counts of half a batch for those of a whole one.
            group.per_param_grad_ready_counts = {}
        group.reset()


def _close_abandoned_no_sync(error: BaseException) -> None:
    """Leave the ``no_sync`` contexts that pipeline schedules enter by hand, without ``try``.

    Otherwise their ``finally`` runs whenever the traceback happens to be freed, and ends gradient
    accumulation in the middle of some later batch. A function that is still running has not abandoned its
    contexts: it may accumulate gradients while it handles the exception that ``error`` was raised from.
    """
    running = {frame for top in sys._current_frames().values() for frame, _ in traceback.walk_stack(top)}
    for frame in _frames_of(error):
        if frame in running:
            continue
        for value in frame.f_locals.values():
            if isinstance(value, contextlib._GeneratorContextManager):
                generator: Any = value.gen
                if generator.gi_code.co_name in _NO_SYNC_GENERATORS and not generator.gi_running:
                    generator.close()


def _frames_of(error: BaseException) -> Iterator[types.FrameType]:
    """Yield the frames of the exception, of those that it was raised from, and of those that it groups."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            grouped = getattr(current, "exceptions", ())  # of an ExceptionGroup
            pending += [current.__cause__, current.__context__]
            pending += [each for each in grouped if isinstance(each, BaseException)]
            yield from (frame for frame, _ in traceback.walk_tb(current.__traceback__))


def _any_rank_was(interrupted: bool, process_group: Any, groups: list[Any]) -> bool:
    if process_group.size() == 1:
        return interrupted
    import torch

    # torch.tensor() would copy the number to the GPU, and wait for it.
    device = groups[0].buckets[0].grad_data.device
    flag = torch.full((), int(interrupted), dtype=torch.int32, device=device)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=process_group)
    return bool(flag.item())


def _gather_parameters(groups: list[Any]) -> None:
    import torch

    with torch.no_grad():
        for group in groups:
            group.start_param_sync()
            group.finish_param_sync(skip_next_bucket_dispatch=True)


def fill_mxfp8_gather_buffer(chunk: Chunk, optimizer: Any) -> None:
    """Copy main parameters to a gradient buffer from which forward passes gather parameters in mxfp8."""
    is_used = getattr(chunk.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False)
    if not (is_used and getattr(chunk, "use_forward_hook", False)):
        return
    optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
    if hasattr(optimizer, "prepare_model_params_for_param_sync"):
        optimizer.prepare_model_params_for_param_sync()
    elif all(hasattr(part, "_copy_main_params_to_param_buffer") for part in optimizers):
        for part in optimizers:
            part._copy_main_params_to_param_buffer()
    else:
        raise MegatronRLPatchesError(
            "training was interrupted with reuse_grad_buf_for_mxfp8_param_ag, and the parameters cannot be "
            "gathered without an optimizer that copies them into the buffer: pass the optimizer, or load a "
            "checkpoint and build the model anew"
        )
