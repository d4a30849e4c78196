"""A learning-rate schedule that goes on where the checkpoint left it, and is not advanced a second time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..common.scopes import Scope

#: Schedulers, each with the step at which loading a checkpoint left it.
_loaded: Scope[list[tuple[Any, int]]] = Scope("loaded_schedulers")


@contextmanager
def keep_loaded_step() -> Iterator[None]:
    """Put schedulers, at the end of the block, back to the step that :func:`record_loaded_step` has recorded.

    Meant for functions that load a checkpoint and then advance the scheduler by the checkpoint's iteration,
    although loading has set it already. If loading has not (``--no-load-optim``, a fresh start), the schedule
    starts from the beginning.
    """
    with _loaded.enter([]) as loaded:
        yield
    for scheduler, num_steps in loaded:
        if scheduler.num_steps != num_steps:
            scheduler.num_steps = num_steps
            scheduler.step(increment=0)  # sets learning rate and weight decay of that step


def record_loaded_step(scheduler: Any) -> None:
    """Record the step of a scheduler after a checkpoint was loaded, whether into the scheduler or not.

    Does nothing outside of :func:`keep_loaded_step`.
    """
    loaded = _loaded.get()
    if loaded is not None and scheduler is not None:
        loaded.append((scheduler, scheduler.num_steps))
