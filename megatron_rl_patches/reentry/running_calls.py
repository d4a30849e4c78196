"""Guarded calls from entry to end: what they found, and what they leave to others that still run.

A call may begin inside of another, in another thread, or between two steps of a generator, and it may end
before the other one or after it. Two rules keep them apart:

- A call that ends puts back what it found. If a later call that found the same things still runs, it gets
  what this one found, and puts that back when it ends.
- A function on a config belongs to the running call that installed it. A call that begins meanwhile does not
  clear it, so the assertion of its framework fires as it does without a guard.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterator
from typing import Any

from ..common.chunks import SYNC_FUNCTIONS, Chunk, Model, distinct_configs, modules_with_modes
from ..common.scopes import restore, snapshot
from ..errors import MegatronRLPatchesError
from . import forward_pre_hooks
from .sync_functions import Place, belongs_to, clear_installed

# What a call found: the id of the owner, and the function that puts it back, which gets owner and value.
_Restorable = tuple[int, Callable[..., None]]

#: Attributes of a config that training loops install, and use until they end.
_LOOP_FUNCTIONS = (*SYNC_FUNCTIONS, "grad_scale_func", "finalize_model_grads_func")
#: The timer that Megatron's and Megatron-Bridge's train() start at entry and never stop.
INTERVAL_TIMER = "interval-time"
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
        self._optimizer = optimizer
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
                replace_methods(chunk)
            if installs:
                clear_installed(model, *self.configs, keep=self._of_others)
            own = {*SYNC_FUNCTIONS, INTERVAL_TIMER} if installs else {INTERVAL_TIMER}
            #: What was at a place at entry, or was left there by a call that has ended since.
            self._foreign = {place: v if place[1] in own else None for place, v in self._values().items()}
            _running[id(self)] = self

    def _state_to_restore(self, optimizer: Any) -> Iterator[tuple[_Restorable, tuple[Any, Any]]]:
        yield (0, _set_gc), (None, gc.isenabled())
        for config in self.configs:
            found = self.model, snapshot(config, *SYNC_FUNCTIONS, "timers")
            yield (id(config), _restore_config), (config, found)
        for chunk in self.model:
            yield (id(chunk), restore), (chunk, snapshot(chunk, "force_all_reduce"))
            yield (id(chunk), restore_methods), (chunk, snapshot(chunk, *METHODS))
        yield (id(optimizer), restore), (optimizer, snapshot(optimizer, "step"))
        machine = _rerun_state_machine()
        yield (0, _set_rerun), (machine, machine and (machine.state, machine.mode))
        yield (id(self._timers), reset_started_since), (self._timers, started(self._timers))

    def _values(self) -> dict[Place, Any]:
        timer = (id(self._timers), INTERVAL_TIMER)
        return {**_functions(self.configs), timer: INTERVAL_TIMER in started(self._timers) or None}

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
            to_restore = {key for key in self._found if failed or key[1] in (_set_gc, restore_methods)}
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
            is_outermost = not any(chunk in call.model for call in _running.values() for chunk in self.model)
            for main in copied_gradients(self._optimizer) if is_outermost else ():
                main.grad = None

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


def copied_gradients(optimizer: Any) -> list[Any]:
    """Return the main parameters whose gradients are copies of 16-bit ones, which ``zero_grad()`` frees."""
    names = "shard_fp32_from_float16_groups", "fp32_from_float16_groups"
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    groups = [group for part in parts for name in names for group in getattr(part, name, ())]
    mains = [main for group in groups for main in group if getattr(main, "grad", None) is not None]
    return [main for main in mains if not main.grad._is_view()]  # in float32 buffers they are views


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


def check_memory(chunk: Chunk) -> None:
    """Raise MegatronRLPatchesError if memory of gradients or parameters is freed, since using it crashes."""
    # A module that is no DDP has a method of the first name.
    lists = [getattr(chunk, name, None) for name in ("buffers", "expert_parallel_buffers")]
    for buffer in (buffer for each in lists if isinstance(each, list) for buffer in each):
        for name in ("grad_data", "param_data"):
            data = getattr(buffer, name, None)
            if data is not None and data.numel() and not data.untyped_storage().size():
                raise MegatronRLPatchesError(
                    f"training has begun while {name} of a model chunk's buffers is freed: restore what was "
                    "offloaded first, with restore_grad_buffers() of each chunk or the framework's onload"
                )


def _zero_grad_buffer(original: Callable[[], Any], chunk: Chunk) -> None:
    # Training begins with it.
    check_memory(chunk)
    original()


#: Method -> what runs it, which gets the bound method and the chunk.
METHODS: dict[str, Callable[..., None]] = {
    "enable_forward_pre_hook": forward_pre_hooks.enable,
    "disable_forward_pre_hook": forward_pre_hooks.disable,
    "zero_grad_buffer": _zero_grad_buffer,
}


def replace_methods(chunk: Chunk) -> None:
    """Let this thread switch forward pre-hooks in any order, and get an error where Megatron would crash."""
    thread = weakref.ref(threading.current_thread())
    for name, method in METHODS.items() if hasattr(chunk, "use_forward_hook") else ():
        # A partial, unlike a function, is copied with its chunk.
        setattr(chunk, name, functools.partial(_run_method, thread, method, getattr(chunk, name), chunk))


def _run_method(thread: Any, method: Any, original: Any, chunk: Chunk, *args: Any, **kwargs: Any) -> Any:
    run = functools.partial(method, original, chunk) if thread() is threading.current_thread() else original
    return run(*args, **kwargs)


def restore_methods(chunk: Chunk, methods: dict[str, Any]) -> None:
    """Put back the methods that :func:`replace_methods` has replaced, unless others have since."""
    ours = [name for name in methods if getattr(vars(chunk).get(name), "func", None) is _run_method]
    restore(chunk, {name: methods[name] for name in ours})


def started(timers: Any) -> dict[str, Any]:
    """Return the started timers of a ``megatron.core.timers.Timers`` by name; for ``None`` no timers."""
    return {name: timer for name, timer in getattr(timers, "_timers", {}).items() if timer._started}


def reset_interval_timer(timers: Any) -> None:
    """Reset the timer that a former call left running, since Megatron asserts that it is not started yet."""
    if timer := started(timers).get(INTERVAL_TIMER):
        timer.reset()  # the time that it was active for stays


def reset_started_since(timers: Any, before: Container[str]) -> None:
    """Reset the running timers, but the interval timer, whose names are not among those ``before``."""
    for name, timer in started(timers).items():
        if name != INTERVAL_TIMER and name not in before:
            timer.reset()
