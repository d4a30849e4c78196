"""A learning-rate schedule that goes on where the checkpoint left it, and is not wound forward twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_loaded: ContextVar[list[tuple[Any, int]] | None] = ContextVar("loaded_schedulers", default=None)


@contextmanager
def as_loaded() -> Iterator[None]:
    """At the end, schedulers are at the step at which loading left them (:func:`note_loaded`).

    For functions that load a checkpoint and then advance the scheduler by what the checkpoint's iteration
    amounts to, although loading has set it already. Where loading did not (``--no-load-optim``, a fresh
    start), the schedule is a fresh one.
    """
    loaded: list[tuple[Any, int]] = []
    token = _loaded.set(loaded)
    try:
        yield
    finally:
        _loaded.reset(token)
    for scheduler, num_steps in loaded:
        if scheduler.num_steps != num_steps:
            scheduler.num_steps = num_steps
            scheduler.step(increment=0)  # learning rate and weight decay of that step


def note_loaded(scheduler: Any) -> None:
    """A checkpoint has just been loaded into the scheduler, or on purpose not; outside, nothing is noted."""
    loaded = _loaded.get()
    if loaded is not None and scheduler is not None:
        loaded.append((scheduler, scheduler.num_steps))
