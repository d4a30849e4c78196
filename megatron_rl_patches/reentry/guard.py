"""One call of a ``train``-like function: entry, normal end, exception."""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from types import CodeType, TracebackType
from typing import Any, TypeVar, overload

from ..errors import MegatronRLPatchesError
from . import timers as megatron_timers
from .chunks import Model, as_model, distinct_configs
from .recovery import recover, synchronize_interrupted
from .sync_functions import METHODS, belongs_to, clear_installed

_log = logging.getLogger("megatron_rl_patches")
_ABSENT = object()
#: The timer that Megatron's and Megatron-Bridge's train() start at entry and never stop.
INTERVAL_TIMER = "interval-time"
_CALLS_DEEP = 2

Function = TypeVar("Function", bound=Callable[..., Any])


class TrainGuard:
    """Context of one call of ``train``; see :func:`reentrant_train`.

    At entry: sync functions installed by a former call are cleared, the interval timer is reset if it was
    left running, and parameters are made whole if a former call broke off. In the end: garbage collection is
    as it was. On an exception also: everything that the call changed on config, chunks, optimizer, timers and
    rerun state machine is as at entry, outstanding collectives are waited for, bucket groups are reset; the
    exception propagates unchanged.

    Args:
        model: list of model chunks, or one chunk.
        optimizer: the ``MegatronOptimizer``, if there is one.
        timers: the host's ``megatron.core.timers.Timers``, if it uses others than ``config.timers``.
        config: the config that the host works with, if it is not the chunks' own.
        installs: the body installs ``no_sync_func``, so it is cleared at entry. ``False`` for a loop that
            relies on functions installed once by others (Megatron-Bridge): without them every microbatch
            would reduce.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        timers: Any = None,
        config: Any = None,
        installs: bool = True,
    ) -> None:
        self._installs = installs
        self._model: Model = as_model(model)
        self._optimizer = optimizer
        self._timers = timers
        self._config = config

    def __enter__(self) -> None:
        model = self._model
        self._collecting = gc.isenabled()
        self._configs = distinct_configs(model, self._config)
        if self._timers is None:
            self._timers = next((config.timers for config in self._configs if _has_timers(config)), None)
        self._at_entry = [
            (config, {name: getattr(config, name, _ABSENT) for name in (*METHODS, "timers")})
            for config in self._configs
        ]
        self._modes = [(chunk, getattr(chunk, "training", None)) for chunk in model]
        self._reducing = [(chunk, getattr(chunk, "force_all_reduce", _ABSENT)) for chunk in model]
        self._step = _own(self._optimizer, "step")
        machine = _rerun_state_machine()
        self._rerun = (machine, machine.state, machine.mode) if machine is not None else None
        megatron_timers.reset_if_running(self._timers, INTERVAL_TIMER)
        self._running = megatron_timers.running(self._timers)
        if self._installs:
            clear_installed(model, *self._configs)
        synchronize_interrupted(model, self._optimizer)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if gc.isenabled() != self._collecting:
            (gc.enable if self._collecting else gc.disable)()
        if error is not None:
            for clean_up in (self._as_at_entry, lambda: recover(self._model, error)):
                try:
                    clean_up()
                except Exception as failure:
                    # The caller's exception is the news.
                    _log.warning("cleaning up after it failed: %s: %s", type(failure).__name__, failure)
        else:
            self._warn_if_left_out()

    def _as_at_entry(self) -> None:
        for config, values in self._at_entry:
            _restore(config, values)
        for chunk, training in self._modes:
            if training is not None and chunk.training != training:
                chunk.train(training)
        for chunk, reducing in self._reducing:
            _restore(chunk, {"force_all_reduce": reducing})
        if _own(self._optimizer, "step") is not self._step:
            _restore(self._optimizer, {"step": self._step})
        if self._rerun is not None:
            machine, state, mode = self._rerun
            machine.state, machine.mode = state, mode
        elif (machine := _rerun_state_machine()) is not None:  # made by this call
            machine.state = type(machine.state).NOT_RUNNING_YET
        megatron_timers.reset_new(self._timers, self._running, but=INTERVAL_TIMER)

    def _warn_if_left_out(self) -> None:
        for config, values in self._at_entry:
            installed = values["no_sync_func"]
            if belongs_to(self._model, installed, "no_sync_func") and config.no_sync_func is None:
                config.no_sync_func = installed
                _log.warning(
                    "a re-entrant train() did not install no_sync_func, which was set at entry: gradients "
                    "were reduced after every microbatch. Install it inside, as Megatron's own train() does."
                )


def installs_sync_functions(function: Callable[..., Any]) -> bool:
    """Does the function set ``no_sync_func``, as Megatron's ``train`` does, or one that it calls?

    Judged by the code, two calls deep within its package; seen are functions that are called by their global
    name, not methods.
    """
    function = inspect.unwrap(function)
    return _sets_sync_functions(getattr(function, "__func__", function), _CALLS_DEEP)


@functools.lru_cache(maxsize=256)
def _sets_sync_functions(function: Callable[..., Any], calls_deep: int) -> bool:
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    if any(op.opname == "STORE_ATTR" and op.argval == "no_sync_func" for op in _operations(code)):
        return True
    package = function.__module__.partition(".")[0]
    called = (function.__globals__.get(op.argval) for op in _operations(code) if op.opname == "LOAD_GLOBAL")
    return calls_deep > 0 and any(
        _sets_sync_functions(inspect.unwrap(other), calls_deep - 1)
        for other in called
        if inspect.isfunction(other) and other.__module__.partition(".")[0] == package
    )


def _operations(code: CodeType) -> Iterator[dis.Instruction]:
    """Of a function and of those that are defined in it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _operations(constant)


def _own(target: Any, name: str) -> Any:
    """The instance's own attribute, not its class's."""
    return getattr(target, "__dict__", {}).get(name, _ABSENT)


def _has_timers(config: Any) -> bool:
    return getattr(config, "timers", None) is not None


def _restore(target: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is not _ABSENT:
            setattr(target, name, value)
        elif name in vars(target):
            delattr(target, name)


def _rerun_state_machine() -> Any:
    # Looked up, not asked for: get_rerun_state_machine() would create one and log about it.
    module = sys.modules.get("megatron.core.rerun_state_machine")
    return getattr(module, "_GLOBAL_RERUN_STATE_MACHINE", None)


@overload
def reentrant_train(target: Function) -> Function: ...
@overload
def reentrant_train(
    target: Any, *, optimizer: Any = None, timers: Any = None, config: Any = None, installs: bool = True
) -> TrainGuard: ...
def reentrant_train(target: Any, **options: Any) -> Any:
    """Make one's own training loop re-enterable, as decorator or context manager.

    ::

        @reentrant_train
        def train(model, optimizer, data):  # one parameter named ``model``, maybe ``optimizer``
            ...

        with reentrant_train(model, optimizer=optimizer):
            ...

    The body is an ordinary Megatron loop: it asserts that ``config.no_sync_func`` is ``None`` and installs
    it. A decorated function that does not (:func:`installs_sync_functions`) is taken to rely on one that is
    installed already, which then stays.

    With ``overlap_param_gather`` entry is a collective over the data-parallel group (one integer), so every
    rank of the group must enter.

    Args:
        target: the function, or the list of model chunks (one chunk will do).
        options: of :class:`TrainGuard`.

    Raises:
        MegatronRLPatchesError: the decorated function has no parameter named ``model``, or it is a generator
            or a coroutine function.
    """
    if not inspect.isroutine(target):
        return TrainGuard(target, **options)
    signature = inspect.signature(target)
    if "model" not in signature.parameters:
        raise MegatronRLPatchesError(
            f"{target.__qualname__}{signature} has no parameter named 'model' (the list of model chunks); "
            "use 'with reentrant_train(model):' inside it instead"
        )
    if inspect.isgeneratorfunction(target) or inspect.iscoroutinefunction(target):
        raise MegatronRLPatchesError(
            f"{target.__qualname__} is a generator or a coroutine function, whose body runs after the call; "
            "use 'with reentrant_train(model):' inside it instead"
        )
    installs = installs_sync_functions(target)

    @functools.wraps(target)
    def train(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        of = bound.arguments
        with TrainGuard(of["model"], optimizer=of.get("optimizer"), installs=installs):
            return target(*args, **kwargs)

    return train
