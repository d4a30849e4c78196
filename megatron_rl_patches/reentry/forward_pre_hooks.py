"""Enabling and disabling forward pre-hooks any number of times, in any order.

With ``overlap_param_gather`` a hook on every submodule waits for the all-gather of its parameters. Upstream,
from megatron-core 0.12 to today, a second ``disable`` raises ``KeyError`` and a second ``enable``
``AssertionError``, and a submodule added in between makes ``disable`` stop half-way (THUDM/slime#1857).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from .chunks import Chunk, Model, as_model, bucket_groups


def enable(original: Callable[[], Any], chunk: Chunk) -> None:
    """``DistributedDataParallel.enable_forward_pre_hook`` that does nothing when the hooks are on.

    Args:
        original: the bound upstream method; its assertion on ``use_forward_hook`` stays in force.
        chunk: the ``DistributedDataParallel`` chunk.
    """
    handles = chunk.remove_forward_pre_hook_handles
    if handles and chunk.use_forward_hook:
        if handles.keys() == set(chunk.module.modules()):
            return
        _remove(handles)
    original()


def disable(original: Callable[..., Any], chunk: Chunk, param_sync: bool = True) -> None:
    """``DistributedDataParallel.disable_forward_pre_hook`` that may be called when the hooks are off.

    Args:
        original: the bound upstream method; its assertion on ``use_forward_hook`` stays in force.
        chunk: the ``DistributedDataParallel`` chunk.
        param_sync: leave the parameters synchronized. With the hooks off already this is a collective over
            the chunk's data-parallel group only when some all-gather is outstanding (:func:`synchronize`).
    """
    handles = chunk.remove_forward_pre_hook_handles
    if handles or not chunk.use_forward_hook:
        try:
            original(param_sync=param_sync)
            return
        except (KeyError, AssertionError) as error:
            if not _is_mismatch(error, chunk):
                raise
    _remove(handles)
    if param_sync:
        synchronize(chunk)


def synchronize(chunk: Chunk) -> None:
    """Complete every parameter all-gather that is in flight or not dispatched since the last step.

    A collective over the data-parallel group of the chunk when there is such a one, otherwise nothing: the
    optimizer leaves the gathering to the hooks, so hooks that are off do not mean parameters that are whole.
    Where the gradient buffer serves as the mxfp8 gather buffer, an all-gather that was not dispatched is not
    staged either, and would turn gradient bytes into weights: only those in flight are completed.
    """
    groups = bucket_groups(chunk)
    if getattr(chunk.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False):
        for group in groups:
            if group.param_gather_handle is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)
    elif any(group.param_gather_handle is not None or not group.param_gather_dispatched for group in groups):
        with _no_grad():
            chunk.start_param_sync(force_sync=True)


@contextmanager
def preserved_hooks(model: Model) -> Iterator[None]:
    """Whatever the body does, and also when it raises, the hooks end in the state they were found in.

    For saving: hosts switch the hooks off, save and switch them on, so that a save between two rollouts
    would leave them on, and a save that raises would leave them off.
    """
    chunks = [chunk for chunk in as_model(model) if getattr(chunk, "use_forward_hook", False)]
    were_on = [bool(chunk.remove_forward_pre_hook_handles) for chunk in chunks]
    try:
        yield
    finally:
        for chunk, was_on in zip(chunks, were_on, strict=True):
            if was_on and not chunk.remove_forward_pre_hook_handles:
                chunk.enable_forward_pre_hook()
            elif not was_on and chunk.remove_forward_pre_hook_handles:
                _remove(chunk.remove_forward_pre_hook_handles)


def _is_mismatch(error: KeyError | AssertionError, chunk: Chunk) -> bool:
    """Did upstream stop because handles and module tree differ, rather than in the all-gather after it?

    A submodule added since: ``KeyError`` with the module as its key. One taken away: a handle is left over.
    """
    if chunk.remove_forward_pre_hook_handles:
        return True
    return isinstance(error, KeyError) and any(error.args[0] is module for module in chunk.module.modules())


def _remove(handles: dict[Any, Any]) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()


def _no_grad() -> Any:
    try:
        import torch
    except ImportError:  # mocked chunks
        return nullcontext()
    return torch.no_grad()
