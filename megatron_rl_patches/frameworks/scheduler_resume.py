"""Schedulers after a resume, in set-up functions that load a checkpoint and then advance the schedule."""

from __future__ import annotations

from typing import Any

from ..common.scopes import Scope
from ..engine.call import Call

#: Schedulers, each with the step at which loading a checkpoint left it.
_loaded: Scope[list[tuple[Any, int]]] = Scope("loaded_schedulers")


def initialize_model_and_optimizer(call: Call) -> Any:
    """Set up, and put schedulers back to the step at which loading a checkpoint left them.

    The function loads a checkpoint and then advances the scheduler by the checkpoint's iteration, although
    loading has set it already. If loading has not (``--no-load-optim``, a fresh start), the schedule starts
    from the beginning.
    """
    with _loaded.enter([]) as loaded:
        result = call()
    for scheduler, num_steps in loaded:
        if scheduler.num_steps != num_steps:
            scheduler.num_steps = num_steps
            scheduler.step(increment=0)  # sets learning rate and weight decay of that step
    return result


def load_checkpoint(call: Call) -> Any:
    """Load a checkpoint, and within :func:`initialize_model_and_optimizer` record the scheduler's step.

    It is recorded whether the checkpoint was loaded into the scheduler or not.
    """
    result, loaded, scheduler = call(), _loaded.get(), call.get("opt_param_scheduler")
    if loaded is not None and scheduler is not None:
        loaded.append((scheduler, scheduler.num_steps))
    return result
