"""Functions that do something else in one thread, and what they always do in all others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from ...common.scopes import restore, snapshot

_lock = threading.Lock()
_switches: dict[tuple[int, str], _Switch] = {}


@contextmanager
def replaced_in_this_thread(owner: Any, name: str, substitute: Callable[..., Any]) -> Iterator[None]:
    """Call ``substitute`` in place of the function ``owner.name``, in the calling thread only.

    The attribute itself belongs to all threads, so it holds a function that asks which thread is calling.
    Blocks of several threads may overlap in any order, and blocks of one thread may nest: the first to
    begin installs that function, and the last to end puts back the very object that was there before.

    The substitute reaches the original through :func:`original_of`.
    """
    with _lock:
        switch = _switches.get((id(owner), name))
        if switch is None:
            switch = _switches[id(owner), name] = _Switch(owner, name)
        switch.blocks += 1
    outer = switch.substitute()
    switch.local.substitute = substitute
    try:
        yield
    finally:
        switch.local.substitute = outer
        with _lock:
            switch.blocks -= 1
            if switch.blocks == 0:
                del _switches[id(owner), name]
                switch.remove()


def original_of(owner: Any, name: str) -> Callable[..., Any]:
    """Return the function that other threads call while :func:`replaced_in_this_thread` is in force."""
    with _lock:
        switch = _switches.get((id(owner), name))
    function: Callable[..., Any] = getattr(owner, name) if switch is None else switch.original
    return function


class _Switch:
    """The function that stands at ``owner.name`` while at least one thread replaces it."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.blocks = 0
        self.original = original = getattr(owner, name)
        self._before = snapshot(owner, name)
        self.local = threading.local()

        @wraps(original)
        def choose(*args: Any, **kwargs: Any) -> Any:
            return (self.substitute() or original)(*args, **kwargs)

        is_static = name == "__new__" or isinstance(self._before[name], staticmethod)
        self._installed = staticmethod(choose) if is_static else choose
        setattr(owner, name, self._installed)

    def substitute(self) -> Callable[..., Any] | None:
        """Return the innermost substitute of the calling thread."""
        substitute: Callable[..., Any] | None = getattr(self.local, "substitute", None)
        return substitute

    def remove(self) -> None:
        """Put the original back, unless somebody has wrapped the function meanwhile: then it stays, idle."""
        if vars(self.owner).get(self.name) is self._installed:
            restore(self.owner, self._before)
