"""Guarded calls from entry to end: what they found, and what they leave to others that still run.

A call may begin inside of another, in another thread, or between two steps of a generator, and it may end
before the other one or after it. Two rules keep them apart:

- A call that ends puts back what it found. If a later call that found the same things still runs, it gets
  what this one found, and puts that back when it ends.
- A function on a config belongs to the running call that installed it. A call that begins meanwhile does not
  clear it, so the assertion of its framework fires as it does without a guard.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ..common.chunks import SYNC_FUNCTIONS, Model, distinct_configs, modules_with_modes
from ..common.scopes import restore, snapshot
from . import chunk_methods
from .sync_functions import Place, belongs_to, clear_installed
from .timers import INTERVAL_TIMER, interval_timer_runs, reset_interval_timer, reset_started_since, running

# What a call found: the id of the owner, and the function that puts it back, which gets owner and value.
_Restorable = tuple[int, Callable[..., None]]

#: Attributes of a config that training loops install, and use until they end.
_LOOP_FUNCTIONS = (*SYNC_FUNCTIONS, "grad_scale_func", "finalize_model_grads_func")
_lock = threading.RLock()
#: The calls that run, by id, in the order in which they began. The references are weak, so that a call which
#: a signal interrupts while it begins or ends does not stay here.
_running: weakref.WeakValueDictionary[int, RunningCall] = weakref.WeakValueDictionary()


def places_in_use(*configs: Any) -> set[Place]:
    """Return the places on these configs whose function belongs to a call that runs."""
    with _lock:
        return set(_owned(_functions(configs)))


class RunningCall:
    """One guarded call, which begins when this is made; see :class:`.TrainGuard` for the arguments.

    A call that does not install the sync functions itself uses what it finds.
    """

    def __init__(self, model: Model, optimizer: Any, timers: Any, config: Any, installs: bool) -> None:
        self.model = model
        self.configs = distinct_configs(model, config)
        candidates = (timers, *(getattr(each, "timers", None) for each in self.configs))
        self._timers = next((each for each in candidates if each is not None), None)
        self._found = dict(self._state_to_restore(optimizer))
        self._modes = modules_with_modes(model)
        #: What calls that failed earlier have left to this one.
        self._inherited: set[_Restorable] = set()
        with _lock:
            #: Places whose value belongs to another running call: that call and the value.
            self._of_others = _owned(self._values())
            if (id(self._timers), INTERVAL_TIMER) not in self._of_others:
                reset_interval_timer(self._timers)
            for chunk in model:
                chunk_methods.replace(chunk)
            if installs:
                clear_installed(model, *self.configs, keep=self._of_others)
            own = {*SYNC_FUNCTIONS, INTERVAL_TIMER} if installs else {INTERVAL_TIMER}
            #: What was at a place at entry, or was left there by a call that has ended since.
            self._foreign = {
                place: value if place[1] in own else None for place, value in self._values().items()
            }
            _running[id(self)] = self

    def _state_to_restore(self, optimizer: Any) -> Iterator[tuple[_Restorable, tuple[Any, Any]]]:
        yield (0, _set_gc), (None, gc.isenabled())
        for config in self.configs:
            found = self.model, snapshot(config, *SYNC_FUNCTIONS, "timers")
            yield (id(config), _restore_config), (config, found)
        for chunk in self.model:
            yield (id(chunk), restore), (chunk, snapshot(chunk, "force_all_reduce"))
            yield (id(chunk), chunk_methods.restore), (chunk, snapshot(chunk, *chunk_methods.METHODS))
        yield (id(optimizer), restore), (optimizer, snapshot(optimizer, "step"))
        machine = _rerun_state_machine()
        yield (0, _set_rerun), (machine, machine and (machine.state, machine.mode))
        yield (id(self._timers), reset_started_since), (self._timers, running(self._timers))

    def _values(self) -> dict[Place, Any]:
        timer = (id(self._timers), INTERVAL_TIMER)
        return {**_functions(self.configs), timer: interval_timer_runs(self._timers) or None}

    def found(self, config: Any) -> dict[str, Any]:
        """Return the sync functions that the config had at entry, by attribute."""
        functions: dict[str, Any] = self._found[id(config), _restore_config][1][1]
        return functions

    def owns(self, place: Place, value: Any) -> bool:
        """Return whether this call has put this value there, or uses it."""
        return value is not None and place in self._foreign and value is not self._foreign[place]

    def end(self, failed: bool) -> None:
        """End the call. Put back garbage collection and methods, and after an exception all that it found."""
        with _lock:
            calls = [*_running.values()]
            later = calls[calls.index(self) + 1 :]
            del _running[id(self)]
            if later or failed:
                for call in (self, *later):
                    call._list_modes()
            to_restore = {key for key in self._found if failed or key[1] in (_set_gc, chunk_methods.restore)}
            to_restore |= self._inherited
            for restorable in self._found:
                heir = next((call for call in later if restorable in call._found), None)
                if heir is not None:
                    heir._found[restorable] = self._found[restorable]
                    heir._inherited.update({restorable} & to_restore)
                elif restorable in to_restore:
                    owner, value = self._found[restorable]
                    _, restore_value = restorable
                    restore_value(owner, value)
            self._leave_functions()

    def _list_modes(self) -> None:
        # There are thousands of modules, so this is done only where it is needed.
        self._found.update({(id(module), _set_mode): (module, mode) for module, mode in self._modes})
        self._modes = []

    def _leave_functions(self) -> None:
        """Put back functions of calls that still run, and tell them which ones are left by this call."""
        values = self._values()
        for config in self.configs:
            for name in _LOOP_FUNCTIONS:
                call, value = self._of_others.get((id(config), name), (None, None))
                if call is not None and id(call) in _running and values[id(config), name] is not value:
                    setattr(config, name, value)
        for place in values.keys() - self._of_others.keys():
            for call in _running.values():
                if place in call._foreign and not _is_of_another(place[1], values[place], self.model):
                    call._foreign[place] = values[place]


def _functions(configs: Any) -> dict[Place, Any]:
    return {(id(config), name): getattr(config, name, None) for config in configs for name in _LOOP_FUNCTIONS}


def _owned(values: dict[Place, Any]) -> dict[Place, tuple[RunningCall, Any]]:
    """Return by place the values that belong to calls that run, and these calls; needs the lock."""
    calls = [*_running.values()]
    return {place: (call, v) for place, v in values.items() for call in calls if call.owns(place, v)}


def _is_of_another(name: str, functions: Any, model: Model) -> bool:
    """Return whether these are sync functions of the model of a running call, and not of this model."""
    if name not in SYNC_FUNCTIONS or belongs_to(model, functions, name):
        return False
    return any(belongs_to(call.model, functions, name) for call in _running.values())


def _restore_config(config: Any, found: tuple[Model, dict[str, Any]]) -> None:
    model, values = found
    names = [name for name in values if not _is_of_another(name, getattr(config, name, None), model)]
    restore(config, {name: values[name] for name in names})


def _set_gc(_: None, enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()


def _set_mode(module: Any, training: bool) -> None:
    module.training = training


def _set_rerun(machine: Any, found: Any) -> None:
    if machine is not None:
        machine.state, machine.mode = found
    elif (machine := _rerun_state_machine()) is not None:  # the call has created it
        machine.state = type(machine.state).NOT_RUNNING_YET


def _rerun_state_machine() -> Any:
    # get_rerun_state_machine() would create one, and log that it did.
    module = sys.modules.get("megatron.core.rerun_state_machine")
    return getattr(module, "_GLOBAL_RERUN_STATE_MACHINE", None)
