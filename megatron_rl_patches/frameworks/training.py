"""What runs around ``train()``, ``save()`` and set-up of Megatron, and of the frameworks on top of it.

torch is not imported, since the loops of a test may run without it.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ..common.chunks import distinct_configs
from ..engine.call import Call
from ..inference.memory.report import MemoryPhases, reset_peaks
from ..reentry import forward_pre_hooks
from ..reentry.guard import TrainGuard
from ..reentry.running_calls import places_in_use
from ..reentry.sync_functions import clear_installed, install_per_config
from ..reentry.timers import interval_timer_started
from .rollout_log_probs import check_rollout, check_verl_rollout

_peaks: dict[str, int] = {}  # of scoring since the last line was logged


def memory_phases(call: Call, name: str, model: Any = None, optimizer: Any = None) -> Any:
    """Return a block that measures the memory of a call by phase, if the option asks for it."""
    global _peaks
    if not call.options.memory_phases:
        return nullcontext()
    peaks, _peaks = _peaks, _peaks if name == "scoring" else {}
    return MemoryPhases(model, optimizer, name, name != "scoring", peaks)


def score(call: Call) -> Any:
    """Score, as a phase of memory."""
    with memory_phases(call, "scoring"):
        return call()


def memory_stats(call: Call) -> Any:
    """Return torch's statistics, with the peaks that phases have reset."""
    if stats := call():
        stats.update({name: max(peak, stats[name]) for name, peak in reset_peaks(call["device"]).items()})
    return stats


def reset_peak_memory_stats(call: Call) -> None:
    """Reset torch's peaks, and those that phases have reset."""
    call()
    reset_peaks(call["device"]).clear()


def train(call: Call, timers: Any = None, installs: bool = True) -> Any:
    """Run a training loop that can be called again, and warn of what spoils reinforcement learning.

    Timers are Megatron's, where the loop leaves one running; for ``installs`` see :class:`.TrainGuard`.
    """
    if warn := call.options.warn:
        check_rollout(call.get("data_iterator"))
    optimizer, config = call.get("optimizer"), call.get("config")
    guard = TrainGuard(call["model"], optimizer, timers, config, installs, warn)
    with memory_phases(call, "other", call["model"], optimizer), guard:
        return call()


def megatron_train(call: Call) -> Any:
    """:func:`train` of Megatron-LM."""
    from megatron.training.global_vars import get_timers

    return train(call, timers=get_timers())


def megatron_training_log(call: Call) -> Any:
    """Log an iteration, and begin a new interval where one ends, at the first iteration of a call, too.

    Megatron-LM's ``train()`` says of its first iteration that its line does not end an interval, so the next
    line counts it a second time (NVIDIA/Megatron-LM#6237). That is right only between two ends.
    """
    from megatron.training.global_vars import get_args

    if call["is_first_iteration"] and call["iteration"] % get_args().log_interval == 0:
        return call(is_first_iteration=False)
    return call()


def bridge_train(call: Call) -> Any:
    """:func:`train` of Megatron-Bridge, whose ``setup()`` has installed the sync functions, once."""
    return train(call, timers=call["global_state"].timers, installs=False)


def update_verl_actor(call: Call) -> Any:
    """Train verl's actor, and report what its rollouts cover."""
    check_verl_rollout(call)
    engine = getattr(getattr(call.instance, "actor", None), "engine", None)
    with memory_phases(call, "other", getattr(engine, "module", None), getattr(engine, "optimizer", None)):
        return call()


def save(call: Call) -> Any:
    """Save, and leave the forward pre-hooks as they were."""
    with memory_phases(call, "save"), forward_pre_hooks.preserved_hooks(call["model"]):
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
    model, config = call["model"], call["model_config"]
    clear_installed(model, config, keep=places_in_use(*distinct_configs(model, config)))
    return call()


def verl_register_megatron_training_hooks(call: Call) -> None:
    """Install verl's functions once per config, which its chunks may share."""
    install_per_config(lambda chunks: call(model=chunks), call["model"])
