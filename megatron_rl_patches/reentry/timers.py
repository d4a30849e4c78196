"""Timers of Megatron that a call leaves running, since they assert that they are not started twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: The timer that Megatron's and Megatron-Bridge's train() start at entry and never stop.
INTERVAL_TIMER = "interval-time"


@contextmanager
def interval_timer_started(timers: Any) -> Iterator[None]:
    """Have the interval timer run for a body that stops it first and starts it last.

    When the body raises, no timer is left running that was not running before.
    """
    before, was_running = running(timers), interval_timer_runs(timers)
    if not was_running:
        timers(INTERVAL_TIMER, log_level=0).start()
    try:
        yield
    except BaseException:
        reset_started_since(timers, before)
        raise
    finally:
        if not was_running:
            reset_interval_timer(timers)


def running(timers: Any) -> list[Any]:
    """Return the started timers of a ``megatron.core.timers.Timers``; for ``None`` an empty list."""
    return [timer for timer in getattr(timers, "_timers", {}).values() if timer._started]


def interval_timer_runs(timers: Any) -> bool:
    """Return whether the interval timer exists and is started."""
    timer = getattr(timers, "_timers", {}).get(INTERVAL_TIMER)
    return timer is not None and bool(timer._started)


def reset_interval_timer(timers: Any) -> None:
    """Reset the timer that a former call left running. ``Timer.reset`` keeps the time it was active for."""
    if interval_timer_runs(timers):
        timers._timers[INTERVAL_TIMER].reset()


def reset_started_since(timers: Any, before: list[Any]) -> None:
    """Reset the running timers, but the interval timer, that were not running before."""
    for timer in running(timers):
        if timer is not timers._timers.get(INTERVAL_TIMER) and not any(timer is other for other in before):
            timer.reset()
