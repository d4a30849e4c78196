"""Random streams stay as they are, and functions of torch and Megatron are replaced in one thread only."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import numpy as np
import torch

from ...common.scopes import restore, snapshot

_lock = threading.Lock()
#: The functions that somebody replaces now, by the identity of their owner and their name.
_replaced: dict[tuple[int, str], _Replaced] = {}


@contextmanager
def replaced_in_this_thread(owner: Any, name: str, substitute: Callable[..., Any]) -> Iterator[None]:
    """Call ``substitute`` in place of the function ``owner.name``, in the calling thread only.

    The attribute itself belongs to all threads, so it holds a function that asks which thread is calling.
    Blocks may overlap and nest: the first to begin installs that function, and the last to end puts back the
    very object that was there before. The substitute reaches the original through :func:`original_of`.
    """
    place = id(owner), name
    with _lock:
        if place not in _replaced:
            _replaced[place] = _Replaced(owner, name)
        replaced = _replaced[place]
        replaced.blocks += 1
    outer = getattr(replaced.thread, "substitute", replaced.original)
    replaced.thread.substitute = substitute
    try:
        yield
    finally:
        replaced.thread.substitute = outer
        with _lock:
            replaced.blocks -= 1
            if replaced.blocks == 0:
                _replaced.pop(place).put_back()


def original_of(owner: Any, name: str) -> Callable[..., Any]:
    """Return the function that other threads call while :func:`replaced_in_this_thread` is in force."""
    return _replaced[id(owner), name].original


class _Replaced:
    """The function at ``owner.name``, which at least one thread replaces."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.blocks = 0
        self.thread = threading.local()
        self.original: Callable[..., Any] = getattr(owner, name)
        self._before = snapshot(owner, name)

        @wraps(self.original)
        def choose(*args: Any, **kwargs: Any) -> Any:
            return getattr(self.thread, "substitute", self.original)(*args, **kwargs)

        is_static = name == "__new__" or isinstance(self._before[name], staticmethod)
        self._installed = staticmethod(choose) if is_static else choose
        setattr(owner, name, self._installed)

    def put_back(self) -> None:
        # Unless somebody has wrapped the function meanwhile: then it stays, and does nothing.
        if vars(self.owner).get(self.name) is self._installed:
            restore(self.owner, self._before)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Put every random stream back at the end, also if the body raises.

    These are the generators of Python, numpy and torch (of CUDA the current device, if it has a context), and
    those of Megatron's RNG tracker. Numbers that another thread draws meanwhile are drawn again later.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    tracker = cuda_rng_tracker()
    tracked = {} if tracker is None else tracker.get_states()
    # Drawing changes a generator in place, so its state is copied.
    moving = {state: state.get_state() for state in tracked.values() if isinstance(state, torch.Generator)}
    has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if has_cuda else []):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for generator, state in moving.items():
            generator.set_state(state)
        # The tracker may have been made within the block.
        if (tracker := cuda_rng_tracker()) is not None:
            if tracked:
                tracker.set_states(tracked)
            elif tracker.get_states():
                tracker.reset()


def cuda_rng_tracker() -> Any:
    """Return Megatron's tracker if there is one; Megatron's own getter would create it and fix its class."""
    random_module = sys.modules.get("megatron.core.tensor_parallel.random")
    return getattr(random_module, "_CUDA_RNG_STATE_TRACKER", None)


def rng_tracker_is_seeded() -> bool:
    """Return whether Megatron's RNG tracker has streams, without which it cannot fork."""
    tracker = cuda_rng_tracker()
    return tracker is not None and bool(tracker.get_states())


@contextmanager
def rng_tracker_that_does_not_fork() -> Iterator[None]:
    """Make ``fork()`` of Megatron's RNG tracker do nothing, in this thread, which may not have seeded it."""
    from megatron.core.tensor_parallel import random as megatron_random

    before = cuda_rng_tracker()
    kind = megatron_random.CudaRNGStatesTracker if before is None else type(before)
    try:
        with replaced_in_this_thread(kind, "fork", lambda *args, **kwargs: nullcontext()):
            yield
    finally:
        # Code that seeds Megatron later can choose its kind of tracker, unless one is there.
        tracker = cuda_rng_tracker()
        if before is None and tracker is not None and not tracker.get_states():
            megatron_random._CUDA_RNG_STATE_TRACKER = None
            megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
