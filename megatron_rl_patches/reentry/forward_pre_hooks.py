"""Enabling and disabling forward pre-hooks any number of times, in any order.

With ``overlap_param_gather`` a hook on every submodule waits for the all-gather of its parameters. Upstream,
from megatron-core 0.14 to today, a second ``disable`` raises ``KeyError`` and a second ``enable``
``AssertionError``, and a submodule added in between makes ``disable`` stop half-way (THUDM/slime#1857).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..common.chunks import Chunk, Model, as_chunks, bucket_groups


def enable(original: Callable[[], Any], chunk: Chunk) -> None:
    """Run ``DistributedDataParallel.enable_forward_pre_hook``, bound to the chunk, unless the hooks are on.

    The assertion of upstream on ``use_forward_hook`` stays in force, here and in :func:`disable`.
    """
    handles = chunk.remove_forward_pre_hook_handles
    if handles and chunk.use_forward_hook:
        if handles.keys() == set(chunk.module.modules()):
            return
        _remove(handles)
    original()


def disable(original: Callable[..., Any], chunk: Chunk, param_sync: bool = True) -> None:
    """Run ``DistributedDataParallel.disable_forward_pre_hook``, bound to the chunk; the hooks may be off.

    If they are off, ``param_sync`` runs :func:`synchronize`.
    """
    handles = chunk.remove_forward_pre_hook_handles
    if handles or not chunk.use_forward_hook:
        try:
            original(param_sync=param_sync)
            return
        except (KeyError, AssertionError) as error:
            # Upstream stops where handles and modules differ. Any other error comes from the gather after it.
            lacks_handle = isinstance(error, KeyError) and error.args[0] in {*chunk.module.modules()}
            if not (handles or lacks_handle):  # handles of a submodule that was removed are left
                raise
    _remove(handles)
    if param_sync:
        synchronize(chunk)


def synchronize(chunk: Chunk) -> None:
    """Complete every parameter all-gather that is in flight, or was not dispatched since the last step.

    If there is one, this is a collective over the data-parallel group of the chunk; otherwise it does
    nothing. The optimizer leaves gathering to the hooks, so without them parameters may be stale.

    Where the gradient buffer serves as the mxfp8 gather buffer, only all-gathers in flight are completed. The
    optimizer has not filled the buffer for any other, and it would turn gradient bytes into weights.
    """
    groups = bucket_groups(chunk)
    if not groups or not (chunk.ddp_config.use_distributed_optimizer or chunk.use_forward_hook):
        return  # every rank updates all parameters
    if getattr(chunk.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False):
        for group in groups:
            if group.param_gather_handle is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)
    elif not all(map(_is_gathered, groups)):
        import torch

        with torch.no_grad():
            chunk.start_param_sync(force_sync=True)


@contextmanager
def gathered_parameters(model: Model) -> Iterator[None]:
    """Run the body on complete parameters, and let the next training step gather them as it would have.

    A forward pass between backward and the optimizer's step makes the hooks gather the old parameters and
    mark them as gathered, and then nobody gathers those that the step has changed. Here each bucket group
    gathers before the body, whether the hooks are on or off, and has its mark back afterwards. This is a
    collective over the data-parallel group if an all-gather is in flight or was not dispatched. Ask
    :func:`why_not_gathered` first.
    """
    groups = [group for chunk in _with_hooks(model) for group in bucket_groups(chunk)]
    were_dispatched = [group.param_gather_dispatched for group in groups]
    try:
        for group in groups:  # this begins an all-gather that was not dispatched
            group.finish_param_sync(skip_next_bucket_dispatch=True)
        yield
    finally:
        for group, was_dispatched in zip(groups, were_dispatched, strict=True):
            group.param_gather_dispatched = was_dispatched


def why_not_gathered(model: Model) -> str | None:
    """Return why the parameters of a chunk cannot be gathered now; ``None``: they can.

    Parameters in mxfp8, and those of the layer-wise optimizer, are gathered through the gradient buffer. The
    former can only be gathered where the training loop has copied them there, the latter leave it zero.
    """
    for chunk in _with_hooks(model):
        config = chunk.ddp_config
        groups = [group for group in bucket_groups(chunk) if not group.param_gather_dispatched]
        buckets = [bucket for group in groups for bucket in group.buckets]
        if getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False) and groups:
            why = "reuse_grad_buf_for_mxfp8_param_ag"
        elif not config.use_distributed_optimizer and any(bucket.grad_data.any() for bucket in buckets):
            why = "the layer-wise optimizer"
        else:
            continue
        return (
            "the parameters of a model in DDP have not been gathered since its last backward pass, and "
            f"gathering them now would destroy gradients: {why} uses the gradient buffer for it. "
            "Score the model between the first forward pass and the last backward pass of a step."
        )
    return None


def is_stale(group: Any) -> bool:
    """Return whether the parameters of this bucket group have not been gathered since the last step."""
    is_alone = getattr(group, "intra_distributed_optimizer_instance_size", 0) == 1
    return not is_alone and group.ddp_config.overlap_param_gather and not _is_gathered(group)


def _is_gathered(group: Any) -> bool:
    return group.param_gather_handle is None and bool(group.param_gather_dispatched)


def _with_hooks(model: Model) -> list[Chunk]:
    return [chunk for chunk in as_chunks(model) if getattr(chunk, "use_forward_hook", False)]


@contextmanager
def preserved_hooks(model: Model) -> Iterator[None]:
    """Restore the state of the forward pre-hooks after the body has returned or raised.

    Frameworks switch the hooks off, save a checkpoint and switch them on. A save between two rollouts would
    leave them on, and a save that raises would leave them off.

    Args:
        model: list of model chunks, or one chunk; chunks without forward pre-hooks are left alone.
    """
    chunks = _with_hooks(model)
    were_on = [bool(chunk.remove_forward_pre_hook_handles) for chunk in chunks]
    try:
        yield
    finally:
        for chunk, was_on in zip(chunks, were_on, strict=True):
            if was_on and not chunk.remove_forward_pre_hook_handles:
                chunk.enable_forward_pre_hook()
            elif not was_on and chunk.remove_forward_pre_hook_handles:
                _remove(chunk.remove_forward_pre_hook_handles)


def _remove(handles: dict[Any, Any]) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()
