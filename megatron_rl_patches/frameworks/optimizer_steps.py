"""Steps of the optimizer that are skipped, and the learning-rate schedule after them and after a resume."""

from __future__ import annotations

from typing import Any

from ..common.chunks import as_chunks
from ..common.scopes import Scope
from ..engine.call import Call
from ..reentry import finite_step


def step(call: Call) -> Any:
    """Step Megatron's optimizer, unless the norm of its gradients is not finite."""
    return finite_step.step(call.instance, call, call.options.finite_step_limit)


def get_megatron_optimizer(call: Call) -> Any:
    """Return the optimizer, whose messages can name the parameters of its chunks from now on."""
    optimizer = call()
    finite_step.history_of(optimizer).chunks = as_chunks(call["model_chunks"])
    return optimizer


def train_one_step(call: Call) -> Any:
    """Train one step of slime or miles, which ask for the norm, assert success, and advance the schedule."""
    optimizer, scheduler = call["optimizer"], call["opt_param_scheduler"]
    if optimizer is None or scheduler is None:  # miles builds neither with --debug-disable-optimizer
        return call()
    skips = finite_step.skips_as_successes(optimizer, call.options.finite_step_limit)
    with skips, finite_step.schedule_waits(scheduler, optimizer):
        return call()


def verl_optimizer_step(call: Call) -> Any:
    """Step the optimizer of verl's engine, which raises where that does not succeed."""
    with finite_step.skips_as_successes(call.instance.optimizer):
        return call()


def verl_lr_scheduler_step(call: Call) -> Any:
    """Advance the schedule of verl's engine, unless all steps of the mini-batches since were skipped."""
    engine = call.instance
    with finite_step.schedule_waits(engine.lr_scheduler, engine.optimizer):
        return call()


def nemo_rl_train(call: Call) -> Any:
    """Train a worker of NeMo-RL, which looks at success, and advances the schedule whatever it was."""
    worker = call.instance
    if worker.optimizer is None or worker.scheduler is None:
        return call()
    with finite_step.schedule_waits(worker.scheduler, worker.optimizer):
        return call()


# --- the schedule after a resume

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
    """Load a checkpoint; in :func:`initialize_model_and_optimizer`, note the scheduler's step after it."""
    result, loaded, scheduler = call(), _loaded.get(), call.get("opt_param_scheduler")
    if loaded is not None and scheduler is not None:
        loaded.append((scheduler, scheduler.num_steps))
    return result
