"""Megatron's timers assert that they are not started twice, and an early return or an exception leaves some
of them running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def running(timers: Any) -> list[Any]:
    """Return the started timers of a ``megatron.core.timers.Timers``; for ``None`` an empty list."""
    return [timer for timer in getattr(timers, "_timers", {}).values() if timer._started]


def reset_if_running(timers: Any, name: str) -> None:
    """Reset one timer that a former call left running. ``Timer.reset`` keeps the time it was active for."""
    timer = getattr(timers, "_timers", {}).get(name)
    if timer is not None and timer._started:
        timer.reset()


def reset_started_since(before: list[Any], timers: Any, except_for: str) -> None:
    """Reset the timers that are running now and were not among those ``before``, except for one name."""
    exception = getattr(timers, "_timers", {}).get(except_for)
    for timer in running(timers):
        if timer is not exception and not any(timer is other for other in before):
            timer.reset()


@contextmanager
def started(timers: Any, name: str) -> Iterator[None]:
    """Start a timer for a body that stops it first and starts it last, unless it is running already.

    When the body raises, no timer is left running that was not running before.
    """
    before = running(timers)
    was_running = getattr(timers, "_timers", {}).get(name) in before
    if not was_running:
        timers(name, log_level=0).start()
    try:
        yield
    except BaseException:
        reset_started_since(before, timers, except_for=name)
        raise
    finally:
        if not was_running:
            reset_if_running(timers, name)
