"""SIGINT at a chosen function call, so that Ctrl-C comes at the same place every time."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock


class Call(NamedTuple):
    """The ``number``-th call of a function, from 0."""

    function: str
    number: int


@contextmanager
def watched(*parts: str, methods: Container[str] = (), at: Call | None = None) -> Iterator[list[Call]]:
    """Record calls of functions by parts of their files' paths, and calls of methods in C by their names.

    SIGINT comes as the call ``at`` begins; for a method in C also as it returns. Ranks that run the same
    code make the same calls, whatever else differs between them.
    """
    counts: Counter[str] = Counter()
    calls: list[Call] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            # Not <listcomp>, nor <genexpr>, which would swallow the interrupt where it is being closed.
            if code.co_name.startswith("<") or not any(part in code.co_filename for part in parts):
                return
            name = f"{code.co_name}, line {code.co_firstlineno}"
        elif event in ("c_call", "c_return") and argument.__name__ in methods:
            name = f"{event} {argument.__name__}"
        else:
            return
        calls.append(Call(name, counts[name]))
        counts[name] += 1
        if calls[-1] == at:
            os.kill(os.getpid(), signal.SIGINT)  # Python switches off what raises in it

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def first_and_last(calls: list[Call]) -> list[Call]:
    """Of each function."""
    counts = Counter(call.function for call in calls)
    return [call for call in calls if call.number in (0, counts[call.function] - 1)]


@contextmanager
def interrupted_after(owner: Any, name: str) -> Iterator[None]:
    """SIGINT once, when the function returns."""
    function, pending = getattr(owner, name), [True]

    def call(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        if pending:
            pending.clear()
            os.kill(os.getpid(), signal.SIGINT)
        return value

    with mock.patch.object(owner, name, call):
        yield
    assert not pending, f"{name} was not called"
