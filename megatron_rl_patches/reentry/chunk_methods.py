"""Methods of a model chunk that a guarded call replaces, by attributes of the chunk, for its thread alone."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ..common import scopes
from ..common.chunks import Chunk
from ..errors import MegatronRLPatchesError
from . import forward_pre_hooks


def check_memory(chunk: Chunk) -> None:
    """Raise MegatronRLPatchesError if memory of gradients or parameters is freed, since using it crashes."""
    # A module that is no DDP has a method of the first name.
    lists = [getattr(chunk, name, None) for name in ("buffers", "expert_parallel_buffers")]
    for buffer in (buffer for each in lists if isinstance(each, list) for buffer in each):
        for name in ("grad_data", "param_data"):
            data = getattr(buffer, name, None)
            if data is not None and data.numel() and not data.untyped_storage().size():
                raise MegatronRLPatchesError(
                    f"training has begun while {name} of a model chunk's buffers is freed: restore what was "
                    "offloaded first, with restore_grad_buffers() of each chunk or the framework's onload"
                )


def zero_grad_buffer(original: Callable[[], Any], chunk: Chunk) -> None:
    """Run ``DistributedDataParallel.zero_grad_buffer``, with which training begins."""
    check_memory(chunk)
    original()


#: Method -> what runs it, which gets the bound method and the chunk.
METHODS: dict[str, Callable[..., None]] = {
    "enable_forward_pre_hook": forward_pre_hooks.enable,
    "disable_forward_pre_hook": forward_pre_hooks.disable,
    "zero_grad_buffer": zero_grad_buffer,
}


def replace(chunk: Chunk) -> None:
    """Let this thread switch forward pre-hooks in any order, and get an error where Megatron would crash."""
    thread = weakref.ref(threading.current_thread())
    for name, method in METHODS.items() if hasattr(chunk, "use_forward_hook") else ():
        # A partial, unlike a function, is copied with its chunk.
        setattr(chunk, name, functools.partial(_run, thread, method, getattr(chunk, name), chunk))


def _run(
    thread: Any, method: Callable[..., None], original: Any, chunk: Chunk, *args: Any, **kwargs: Any
) -> Any:
    run = functools.partial(method, original, chunk) if thread() is threading.current_thread() else original
    return run(*args, **kwargs)


def restore(chunk: Chunk, methods: dict[str, Any]) -> None:
    """Put back the methods that :func:`replace` has replaced, but for those that other code set since."""
    ours = [name for name in methods if getattr(vars(chunk).get(name), "func", None) is _run]
    scopes.restore(chunk, {name: methods[name] for name in ours})
