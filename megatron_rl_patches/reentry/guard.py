"""One call of a ``train``-like function: entry, normal end, exception."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from ..common.chunks import SYNC_FUNCTIONS, Model, as_chunks, config_of, distinct_configs, modules_with_modes
from ..common.scopes import restore, snapshot
from ..errors import MegatronRLPatchesError
from . import router_replay
from .recovery import recover, synchronize_interrupted
from .sync_functions import belongs_to, clear_installed

_log = logging.getLogger("megatron_rl_patches")
#: The timer that Megatron's and Megatron-Bridge's train() start at entry and never stop. Timers assert that
#: they are not started twice.
INTERVAL_TIMER = "interval-time"

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(eq=False)
class TrainGuard:
    """Context of one call of ``train``; see :func:`reentrant_train`.

    At entry, parameters are gathered if a former call broke off, sync functions that a former call installed
    are cleared, and the interval timer is reset if it was left running. At the end, garbage collection is
    enabled or disabled as it was at entry. After an exception, everything else that the call changed on
    config, modules, optimizer, timers and rerun state machine is as at entry too, outstanding collectives
    have been waited for, and bucket groups are reset; the exception propagates unchanged.

    Args:
        model: list of model chunks, or one chunk.
        optimizer: the ``MegatronOptimizer``, if there is one.
        timers: the framework's ``megatron.core.timers.Timers``, if it uses others than ``config.timers``.
        config: the config that the framework works with, if it is not the chunks' own.
        installs: whether the body installs ``no_sync_func``, which is then cleared at entry. Pass ``False``
            for a loop that relies on functions installed once by others (Megatron-Bridge): without them
            gradients would be reduced after every microbatch.
    """

    model: Any
    optimizer: Any = None
    timers: Any = None
    config: Any = None
    installs: bool = True

    def __enter__(self) -> None:
        self._model = model = as_chunks(self.model)
        # This may raise, so it comes before the first change: nobody calls __exit__ then.
        synchronize_interrupted(model, self.optimizer)
        router_replay.finish_clearing(model)
        self._gc_was_enabled = gc.isenabled()
        self._configs = distinct_configs(model, self.config)
        timers = (self.timers, *(getattr(config, "timers", None) for config in self._configs))
        self._timers = next((each for each in timers if each is not None), None)
        self._attributes_at_entry = [
            *((config, snapshot(config, *SYNC_FUNCTIONS, "timers")) for config in self._configs),
            *((chunk, snapshot(chunk, "force_all_reduce")) for chunk in model),
            (self.optimizer, snapshot(self.optimizer, "step")),
        ]
        self._modes = modules_with_modes(model)
        machine = _rerun_state_machine()
        self._rerun = (machine, machine.state, machine.mode) if machine is not None else None
        _reset_interval_timer(self._timers)
        self._running_timers = _running(self._timers)
        if self.installs:
            clear_installed(model, *self._configs)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if gc.isenabled() != self._gc_was_enabled:
            (gc.enable if self._gc_was_enabled else gc.disable)()
        if error is None:
            self._warn_if_not_installed()
            return
        for clean_up in (
            self._restore,
            lambda: router_replay.clear(self._model),
            lambda: recover(self._model, error),
        ):
            try:
                clean_up()
            except Exception as failure:
                # Only a warning, since the caller has to see the exception of the training step.
                message = "clean-up after an exception in train() failed: %s: %s"
                _log.warning(message, type(failure).__name__, failure)

    def _restore(self) -> None:
        for owner, attributes in self._attributes_at_entry:
            restore(owner, attributes)
        for module, training in self._modes:
            module.training = training
        if self._rerun is not None:
            machine, state, mode = self._rerun
            machine.state, machine.mode = state, mode
        elif (machine := _rerun_state_machine()) is not None:  # this call has created it
            machine.state = type(machine.state).NOT_RUNNING_YET
        _reset_started_since(self._running_timers, self._timers)

    def _warn_if_not_installed(self) -> None:
        for config, attributes in self._attributes_at_entry[: len(self._configs)]:
            installed = attributes["no_sync_func"]
            if config.no_sync_func is None and belongs_to(self._model, installed, "no_sync_func"):
                config.no_sync_func = installed
                _log.warning(
                    "a re-entrant train() did not install no_sync_func, which was set at entry: gradients "
                    "were reduced after every microbatch. Install it inside, as Megatron's own train() does, "
                    "or guard the loop with reentrant_train(..., installs=False)."
                )


@contextmanager
def interval_timer_started(timers: Any) -> Iterator[None]:
    """Have the interval timer run for a body that stops it first and starts it last.

    When the body raises, no timer is left running that was not running before.
    """
    before = _running(timers)
    was_running = getattr(timers, "_timers", {}).get(INTERVAL_TIMER) in before
    if not was_running:
        timers(INTERVAL_TIMER, log_level=0).start()
    try:
        yield
    except BaseException:
        _reset_started_since(before, timers)
        raise
    finally:
        if not was_running:
            _reset_interval_timer(timers)


def _running(timers: Any) -> list[Any]:
    """Return the started timers of a ``megatron.core.timers.Timers``; for ``None`` an empty list."""
    return [timer for timer in getattr(timers, "_timers", {}).values() if timer._started]


def _reset_interval_timer(timers: Any) -> None:
    """Reset the timer that a former call left running. ``Timer.reset`` keeps the time it was active for."""
    timer = getattr(timers, "_timers", {}).get(INTERVAL_TIMER)
    if timer is not None and timer._started:
        timer.reset()


def _reset_started_since(before: list[Any], timers: Any) -> None:
    """Reset the running timers, but the interval timer, that were not running before."""
    for timer in _running(timers):
        if timer is not timers._timers.get(INTERVAL_TIMER) and not any(timer is other for other in before):
            timer.reset()


def _rerun_state_machine() -> Any:
    # get_rerun_state_machine() would create one, and log that it did.
    module = sys.modules.get("megatron.core.rerun_state_machine")
    return getattr(module, "_GLOBAL_RERUN_STATE_MACHINE", None)


@overload
def reentrant_train(target: Function, **options: Any) -> Function: ...
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
    it. One that relies on what others have installed once is guarded with ``installs=False``.

    With ``overlap_param_gather`` entry is a collective over the data-parallel group (one integer), so every
    rank of the group must enter.

    Args:
        target: the list of model chunks (one chunk will do), or what takes them as its argument ``model``: a
            function, a method, a ``functools.partial``, or an object with ``__call__`` that is no module.
        options: of :class:`TrainGuard`.

    Raises:
        MegatronRLPatchesError: the function has no parameter named ``model``, its body runs after the call (a
            generator or a coroutine function), or the target is a class, or neither chunks nor a function.
    """
    function = functools.partial(target).func if callable(target) else None  # unwraps partials
    if inspect.isclass(function):
        raise MegatronRLPatchesError(
            f"{function.__qualname__} is a class; decorate the method that takes the model chunks as 'model'"
        )
    if function is None or hasattr(target, "modules"):
        chunks = as_chunks(target)
        _check_chunks(chunks)
        return TrainGuard(chunks, **options)
    bind = _model_binder(target)

    # A function's attributes are copied to the wrapper. An object's attributes are its own state and are not.
    @functools.wraps(target, updated=("__dict__",) if inspect.isroutine(target) else ())
    def train(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(args, kwargs)
        with TrainGuard(arguments["model"], **{"optimizer": arguments.get("optimizer"), **options}):
            return target(*args, **kwargs)

    return train


def _check_chunks(chunks: Model) -> None:
    for chunk in chunks:
        if not hasattr(chunk, "modules") and config_of(chunk) is None:
            raise MegatronRLPatchesError(
                f"{type(chunk).__qualname__} is no model chunk, since it has neither modules nor a config; "
                "give the list of model chunks, or a function that takes it as 'model'"
            )


def _model_binder(target: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """Return a function from ``args`` and ``kwargs`` of a call of the target to the arguments by name."""
    # The signature of a partial lacks the arguments that are bound already, so its function's is used.
    partial = functools.partial(target)
    function = partial.func
    called = function if inspect.isroutine(function) else type(function).__call__
    name = getattr(inspect.unwrap(called), "__qualname__", repr(target))

    def refusal(reason: str) -> MegatronRLPatchesError:
        return MegatronRLPatchesError(f"{reason}; use 'with reentrant_train(model):' inside it instead")

    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise refusal(f"{name} has no signature that Python can tell") from error
    parameter = signature.parameters.get("model")
    if parameter is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise refusal(f"{name}{signature} has no parameter named 'model' that takes the list of model chunks")
    runs_later = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
    if any(does(called) for does in runs_later):
        raise refusal(f"{name} is a generator or a coroutine function, whose body runs after the call")

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = signature.bind(*partial.args, *args, **{**partial.keywords, **kwargs})
        bound.apply_defaults()
        return bound.arguments

    return bind
