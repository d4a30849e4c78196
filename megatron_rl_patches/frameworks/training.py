"""What runs around ``train()``, ``save()`` and set-up of Megatron, and of the frameworks on top of it.

torch is not imported, since the loops of a test may run without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

from .. import inference
from ..common.chunks import distinct_configs
from ..common.text import listed
from ..engine.call import Call
from ..errors import PatchError
from ..reentry import forward_pre_hooks, guard, running_calls
from ..reentry.sync_functions import clear_installed, install_per_config
from .rollout_log_probs import check_rollout, check_verl_rollout

#: So long a rank waits in its first guarded call for those of other ranks.
PATIENCE = timedelta(minutes=5)
_one_thread = threading.Lock()
_peaks: dict[str, int] = {}  # of scoring since the last line was logged


def memory_phases(options: Any, name: str, model: Any = None, optimizer: Any = None) -> Any:
    """Return a block that measures the memory of a call by phase, if the option asks for it."""
    global _peaks
    if not options.memory_phases:
        return nullcontext()
    peaks, _peaks = _peaks, _peaks if name == "scoring" else {}
    return inference.MemoryPhases(model, optimizer, name, name != "scoring", peaks)


def score(call: Call) -> Any:
    """Score, as a phase of memory."""
    with memory_phases(call.options, "scoring"):
        return call()


def compare_ranks_at_first_call(compare: Callable[[], None], is_wanted: Callable[[], bool]) -> None:
    """Run ``compare``, a collective over all ranks that raises if they differ, in the first guarded call.

    A rank without the patch never starts it. So ranks wait first until the store of the default process group
    has a key of each. Later calls compare, too, until ranks have agreed, or it is not wanted any more.
    After ``PATIENCE`` it raises :class:`PatchError` if a rank has begun no guarded call.
    """
    import torch.distributed as dist

    with _one_thread:
        if not (guard.before_calls and dist.is_available() and dist.is_initialized()):
            return  # another thread has compared, or there are no ranks yet
        if is_wanted():
            store = dist.distributed_c10d._get_default_store()
            keys = [f"{__name__}/{rank}" for rank in range(dist.get_world_size())]
            store.set(keys[dist.get_rank()], "")
            try:
                store.wait(keys, PATIENCE)
            except RuntimeError:
                missing = listed([rank for rank, key in enumerate(keys) if not store.check([key])])
                problem = f"rank {missing} called no patched train() with verify: set its variables there"
                raise PatchError(problem) from None
            try:
                compare()
            finally:  # the next comparison waits, too
                store.delete_key(keys[dist.get_rank()])
        guard.before_calls.clear()


def train(call: Call, timers: Any = None, installs: bool = True) -> Any:
    """Run a training loop that can be called again, and warn of what spoils reinforcement learning.

    Timers are Megatron's, where the loop leaves one running; for ``installs`` see :class:`.TrainGuard`.
    """
    if warn := call.options.warn:
        check_rollout(call.get("data_iterator"))
    optimizer, config = call.get("optimizer"), call.get("config")
    guarded = guard.TrainGuard(call["model"], optimizer, timers, config, installs, warn)
    with memory_phases(call.options, "other", call["model"], optimizer), guarded:
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
    for function in [*guard.before_calls]:  # verl calls no function that has a guard
        function()
    check_verl_rollout(call)
    engine = getattr(getattr(call.instance, "actor", None), "engine", None)
    with memory_phases(call.options, "other", *(getattr(engine, n, None) for n in ("module", "optimizer"))):
        return call()


def save(call: Call) -> Any:
    """Save, and leave the forward pre-hooks as they were."""
    with memory_phases(call.options, "save"), forward_pre_hooks.preserved_hooks(call["model"]):
        return call()


def megatron_save(call: Call) -> Any:
    """:func:`save` of Megatron-LM, which stops a timer that only its ``train()`` starts.

    When it raises, no timer is left running that was not running before.
    """
    from megatron.training.global_vars import get_timers

    timers = get_timers()
    before = running_calls.started(timers)
    if running_calls.INTERVAL_TIMER not in before:
        timers(running_calls.INTERVAL_TIMER, log_level=0).start()
    try:
        return save(call)
    except BaseException:
        running_calls.reset_started_since(timers, before)
        raise
    finally:
        if running_calls.INTERVAL_TIMER not in before:
            running_calls.reset_interval_timer(timers)


def disable_forward_pre_hook(call: Call) -> None:
    """Disable the hooks, which may be off already."""
    forward_pre_hooks.disable(call.function, call.instance, *call.args, **call.kwargs)


def enable_forward_pre_hook(call: Call) -> None:
    """Enable the hooks, which may be on already."""
    forward_pre_hooks.enable(call.function, call.instance)


def bridge_update_model_config_funcs(call: Call) -> Any:
    """Clear what a former call of Megatron-Bridge has installed, and install afresh."""
    model, config = call["model"], call["model_config"]
    clear_installed(model, config, keep=running_calls.places_in_use(*distinct_configs(model, config)))
    return call()


def verl_register_megatron_training_hooks(call: Call) -> None:
    """Install verl's functions once per config, which its chunks may share."""
    install_per_config(lambda chunks: call(model=chunks), call["model"])
