"""What the patch ``reentrant-train`` puts around functions of Megatron and of the frameworks."""

from __future__ import annotations

from typing import Any

from ..engine.call import Call
from ..reentry import forward_pre_hooks
from ..reentry.checks import note_tokens, watched
from ..reentry.guard import INTERVAL_TIMER, TrainGuard
from ..reentry.sync_functions import clear_installed, install_per_config
from ..reentry.timers import started
from . import rollout_log_probs


def train(call: Call, timers: Any = None, installs: bool = True) -> Any:
    arguments = call.arguments
    model, optimizer = call["model"], arguments.get("optimizer")
    guard = TrainGuard(model, optimizer, timers, arguments.get("config"), installs)
    if not call.options.warn:
        with guard:
            return call()
    rollout_log_probs.check(arguments.get("data_iterator"))
    with watched(model, optimizer), guard:
        return call()


def megatron_train(call: Call) -> Any:
    return train(call, timers=_timers())


def bridge_train(call: Call) -> Any:
    # setup() has installed the sync functions, once.
    return train(call, timers=call["global_state"].timers, installs=False)


def forward_step(call: Call) -> Any:
    result = call()
    note_tokens(result)
    return result


def save(call: Call) -> Any:
    with forward_pre_hooks.preserved_hooks(call["model"]):
        return call()


def megatron_save(call: Call) -> Any:
    with started(_timers(), INTERVAL_TIMER):
        return save(call)


def disable_forward_pre_hook(call: Call) -> None:
    forward_pre_hooks.disable(call.wrapped, call.instance, call["param_sync"])


def enable_forward_pre_hook(call: Call) -> None:
    forward_pre_hooks.enable(call.wrapped, call.instance)


def bridge_set_up(call: Call) -> Any:
    clear_installed(call["model"], call["model_config"])
    return call()


def verl_register(call: Call) -> None:
    install_per_config(lambda chunks: call(model=chunks), call["model"])


def _timers() -> Any:
    from megatron.training.global_vars import get_timers

    return get_timers()
