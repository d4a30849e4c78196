"""Steps of the optimizer that are skipped, and what frameworks expect of a step."""

from __future__ import annotations

from typing import Any

from ..engine.call import Call
from ..reentry import finite_step


def step(call: Call) -> Any:
    """Step Megatron's optimizer, unless the norm of its gradients is not finite."""
    return finite_step.step(call.instance, call, call.options.finite_step_limit)


def get_megatron_optimizer(call: Call) -> Any:
    """Return the optimizer, whose messages can name the parameters of its chunks from now on."""
    optimizer = call()
    finite_step.name_parameters_of(optimizer, call["model_chunks"])
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
