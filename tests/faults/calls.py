"""SIGINT at a chosen function call, so that Ctrl-C comes at the same place every time."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock


class Call(NamedTuple):
    """The ``number``-th call of a function, from 0."""

    function: str
    number: int


class Watched:
    """Records calls of functions by parts of their files' paths, and calls of methods in C by their names.

    Ranks that run the same code make the same calls, whatever else differs between them.
    """

    def __init__(self, *parts: str, methods: frozenset[str] = frozenset()) -> None:
        self._parts, self._methods = parts, methods
        self._counts: Counter[str] = Counter()
        self.calls: list[Call] = []

    @contextmanager
    def recorded(self) -> Iterator[list[Call]]:
        with self._profiled(self._note):
            yield self.calls

    @contextmanager
    def interrupted_at(self, place: Call, by: signal.Signals = signal.SIGINT) -> Iterator[None]:
        """A signal as the call begins; for a method in C also ``c_return``, when it is done."""

        def strike(*event: Any) -> None:
            if self._note(*event) == place:
                # Python switches off what raises in it.
                os.kill(os.getpid(), by)

        with self._profiled(strike):
            yield

    @contextmanager
    def _profiled(self, function: Any) -> Iterator[None]:
        sys.setprofile(function)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> Call | None:
        if event == "call":
            code = frame.f_code
            # A generator that is being closed would swallow the interrupt.
            if code.co_name == "<genexpr>" or not any(part in code.co_filename for part in self._parts):
                return None
            name = f"{code.co_name}, line {code.co_firstlineno}"
        elif event in ("c_call", "c_return") and argument.__name__ in self._methods:
            name = f"{event} {argument.__name__}"
        else:
            return None
        self.calls.append(Call(name, self._counts[name]))
        self._counts[name] += 1
        return self.calls[-1]


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
