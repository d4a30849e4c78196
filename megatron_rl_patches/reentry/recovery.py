"""What an exception in the middle of a training step leaves behind, and how the next call copes.

``recover`` runs in the exception handler and uses no collective: on other ranks the step may have gone well.
``synchronize_interrupted`` runs at the next entry, where all ranks are, and makes parameters whole again.
"""

from __future__ import annotations

import contextlib
import logging
import types
import weakref
from collections.abc import Iterator
from typing import Any

from ..errors import MegatronRLPatchesError
from .chunks import Chunk, Model, bucket_groups
from .forward_pre_hooks import synchronize

_log = logging.getLogger("megatron_rl_patches")
_interrupted: weakref.WeakSet[Any] = weakref.WeakSet()

# Generators that put DDP into "not the last microbatch": its own, and the schedule's over several chunks.
_NO_SYNC_GENERATORS = frozenset({"no_sync", "multi_no_sync"})


def recover(model: Model, error: BaseException) -> None:
    """Make the chunks re-enterable after ``error`` escaped from a training step.

    Waits for the collectives that are in flight (up to the process group's timeout, should a peer never have
    dispatched its part), clears their handles, drops gradients that were on their way into the gradient
    buffer and resets the bucket groups. Parameters are not touched; the chunks are marked for
    :func:`synchronize_interrupted`. What goes wrong here is logged, never raised: the caller's exception is
    the news.
    """
    # First: a second Ctrl-C may end the waiting.
    _interrupted.update(model)
    _close_abandoned_no_sync(error)
    for chunk in model:
        _reset_groups(chunk)


def synchronize_interrupted(model: Model, optimizer: Any = None) -> None:
    """Before the first forward of a call: make parameters whole if a former call broke off on some rank.

    With overlapped all-gather of parameters this is a collective: the ranks that share a bucket group agree
    by one all-reduce of one integer, and gather the parameters if any of them was interrupted. Without
    overlap it costs nothing unless this rank was interrupted before the all-gather of a step, which no other
    rank of the group can have passed alone.

    Args:
        model: chunks of this rank.
        optimizer: needed only where the gradient buffer serves as the mxfp8 gather buffer, to stage it.

    Raises:
        MegatronRLPatchesError: parameters must be gathered through a gradient buffer that cannot be staged.
    """
    for chunk in model:
        config = getattr(chunk, "ddp_config", None)
        interrupted = chunk in _interrupted
        if interrupted:  # then so may have been the recovery
            _reset_groups(chunk)
        # Not by use_distributed_optimizer: from 0.17 on the layer-wise optimizer overlaps without it.
        if getattr(chunk, "use_forward_hook", False):
            for group, its_buckets in _by_process_group(chunk):
                if _any_rank(interrupted, group, its_buckets):
                    _interrupted.add(chunk)  # until it is done
                    _stage(chunk, optimizer)
                    _gather(its_buckets)
        elif interrupted and getattr(config, "use_distributed_optimizer", False):
            synchronize(chunk)
    _interrupted.difference_update(model)


def _reset_groups(chunk: Chunk) -> None:
    for group in bucket_groups(chunk):
        try:
            _reset(group)
        except Exception as failure:
            _log.warning("recovering a bucket group failed: %s: %s", type(failure).__name__, failure)


def _reset(group: Any) -> None:
    try:
        if group.param_gather_handle is not None:
            # Not wait() alone: what follows an all-gather (fp8 post-processing, mxfp8 copies) is due as well.
            group.finish_param_sync(skip_next_bucket_dispatch=True)
        if group.grad_reduce_handle is not None:
            group.grad_reduce_handle.wait()
    finally:
        group.param_gather_handle = group.grad_reduce_handle = None
        for parameter in group.params:
            # Raised between autograd and the hook that adds it to the buffer. The next backward would add to
            # it, and of parameters that another rank updates the optimizer clears none.
            parameter.grad = None
        _reset_counts(group)


def _reset_counts(group: Any) -> None:
    if getattr(group, "is_first_batch", False):
        # From 0.16 on reset() would take the counts of half a batch for those of a whole one.
        group.per_param_grad_ready_counts = {}
    group.reset()


def _close_abandoned_no_sync(error: BaseException) -> None:
    """Leave the ``no_sync`` contexts that pipeline schedules enter by hand, without ``try``.

    Otherwise their ``finally`` runs whenever the traceback happens to be freed, and ends gradient
    accumulation in the middle of some later batch.
    """
    for frame in _frames(error):
        for value in frame.f_locals.values():
            if isinstance(value, contextlib._GeneratorContextManager):
                generator: Any = value.gen
                if generator.gi_code.co_name in _NO_SYNC_GENERATORS and not generator.gi_running:
                    generator.close()


def _frames(error: BaseException) -> Iterator[types.FrameType]:
    """Frames of the exception, and of those that it was raised from."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        error_or_none = pending.pop()
        if error_or_none is None or id(error_or_none) in seen:
            continue
        seen.add(id(error_or_none))
        pending += [error_or_none.__cause__, error_or_none.__context__]
        traceback = error_or_none.__traceback__
        while traceback is not None:
            yield traceback.tb_frame
            traceback = traceback.tb_next


def _by_process_group(chunk: Chunk) -> list[tuple[Any, list[Any]]]:
    """Bucket groups by the process group that gathers them: dense parameters and experts differ."""
    found: dict[int, tuple[Any, list[Any]]] = {}
    for buckets in bucket_groups(chunk):
        group = buckets.intra_distributed_optimizer_instance_group
        found.setdefault(id(group), (group, []))[1].append(buckets)
    return list(found.values())


def _any_rank(flag: bool, process_group: Any, its_buckets: list[Any]) -> bool:
    import torch

    device = its_buckets[0].buckets[0].grad_data.device
    agreed = torch.tensor(int(flag), dtype=torch.int32, device=device)
    torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MAX, group=process_group)
    return bool(agreed.item())


def _gather(its_buckets: list[Any]) -> None:
    import torch

    with torch.no_grad():
        for buckets in its_buckets:
            buckets.start_param_sync()
            buckets.finish_param_sync(skip_next_bucket_dispatch=True)


def _stage(chunk: Chunk, optimizer: Any) -> None:
    if not getattr(chunk.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False):
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
            "gathered without an optimizer that stages them: pass the optimizer, or load a checkpoint and "
            "build the model anew"
        )
