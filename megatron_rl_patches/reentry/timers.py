"""Megatron's timers assert that they are not started twice; an early return or an exception leaves some
on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def running(timers: Any) -> list[Any]:
    """The started timers of a ``megatron.core.timers.Timers``; empty for ``None``."""
    return [timer for timer in getattr(timers, "_timers", {}).values() if timer._started]


def reset_if_running(timers: Any, name: str) -> None:
    """Reset one timer that a former call left running. ``Timer.reset`` keeps the time it was active for."""
    timer = getattr(timers, "_timers", {}).get(name)
    if timer is not None and timer._started:
        timer.reset()


def reset_new(timers: Any, before: list[Any], but: str) -> None:
    """Reset the timers that run now and did not run then, all but one."""
    spared = getattr(timers, "_timers", {}).get(but)
    for timer in running(timers):
        if timer is not spared and not any(timer is other for other in before):
            timer.reset()


@contextmanager
def started(timers: Any, name: str) -> Iterator[None]:
    """For a body that stops this timer first and starts it last: it may now also be called when it is off.

    When the body raises, no timer is left running that was not.
    """
    timer = getattr(timers, "_timers", {}).get(name)
    was_running = timer is not None and timer._started
    before = running(timers)
    if not was_running:
        timers(name, log_level=0).start()
    try:
        yield
    except BaseException:
        reset_new(timers, before, but=name)
        raise
    finally:
        if not was_running:
            reset_if_running(timers, name)
