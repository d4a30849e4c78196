"""What is around ``train()``, ``save()`` and the hooks of Megatron, and of the frameworks on top of it."""

from __future__ import annotations

from typing import Any

from ..engine.call import Call
from ..reentry import forward_pre_hooks, training_warnings
from ..reentry.guard import TrainGuard, interval_timer_started
from ..reentry.sync_functions import clear_installed, install_per_config
from . import rollout_log_probs


def train(call: Call, timers: Any = None, installs: bool = True) -> Any:
    """Run a training loop that can be called again, and warn of what spoils reinforcement learning.

    Args:
        timers: Megatron's, where the loop leaves one running.
        installs: the loop installs the sync functions itself, see :class:`.TrainGuard`.
    """
    model, optimizer = call["model"], call.get("optimizer")
    config = call.get("config")
    guard = TrainGuard(model, optimizer=optimizer, timers=timers, config=config, installs=installs)
    if not call.options.warn:
        with guard:
            return call()
    rollout_log_probs.check(call.get("data_iterator"))
    with training_warnings.watched(model, optimizer), guard:
        return call()


def megatron_train(call: Call) -> Any:
    """:func:`train` of Megatron-LM."""
    from megatron.training.global_vars import get_timers

    return train(call, timers=get_timers())


def bridge_train(call: Call) -> Any:
    """:func:`train` of Megatron-Bridge, whose ``setup()`` has installed the sync functions, once."""
    return train(call, timers=call["global_state"].timers, installs=False)


def forward_step(call: Call) -> Any:
    """Run one forward step, and count the tokens of its loss."""
    result = call()
    training_warnings.note_tokens(result)
    return result


def save(call: Call) -> Any:
    """Save, and leave the forward pre-hooks as they were."""
    with forward_pre_hooks.preserved_hooks(call["model"]):
        return call()


def megatron_save(call: Call) -> Any:
    """:func:`save` of Megatron-LM, which stops a timer that only its ``train()`` starts."""
    from megatron.training.global_vars import get_timers

    with interval_timer_started(get_timers()):
        return save(call)


def disable_forward_pre_hook(call: Call) -> None:
    """Disable the hooks, which may be off already."""
    forward_pre_hooks.disable(call.function, call.instance, *call.args, **call.kwargs)


def enable_forward_pre_hook(call: Call) -> None:
    """Enable the hooks, which may be on already."""
    forward_pre_hooks.enable(call.function, call.instance)


def bridge_update_model_config_funcs(call: Call) -> Any:
    """Clear what a former call of Megatron-Bridge has installed, and install afresh."""
    clear_installed(call["model"], call["model_config"])
    return call()


def verl_register_megatron_training_hooks(call: Call) -> None:
    """Install verl's functions once per config, which its chunks may share."""
    install_per_config(lambda chunks: call(model=chunks), call["model"])
