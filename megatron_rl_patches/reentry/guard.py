"""One call of a ``train``-like function: entry, normal end, exception."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from ..common.chunks import as_chunks, config_of
from ..common.messages import Message
from ..common.text import one_line
from ..errors import MegatronRLPatchesError
from . import router_replay
from .recovery import recover, synchronize_interrupted
from .running_calls import RunningCall
from .sync_functions import belongs_to
from .training_warnings import Watch

_CLEAN_UP_FAILED = Message(
    "clean-up after an exception in train() failed: {failure}",
    "train() raises its own exception; another train() in this process may fail.",
    "Find the cause in that exception, and restart the process.",
)
_NOT_INSTALLED = Message(
    "config.no_sync_func was set before train(); the guard cleared it, and train() did not set it again",
    "Gradients were reduced after every microbatch, which is slow and may make them wrong.",
    "Set it inside train(), as Megatron's own train() does, or use reentrant_train(..., installs=False).",
)

Function = TypeVar("Function", bound=Callable[..., Any])
#: Functions that run before each guarded call, which does not begin if one raises.
before_calls: list[Callable[[], None]] = []
#: What :func:`reentrant_train` has made of functions, and the full names of these.
decorated: weakref.WeakKeyDictionary[Callable[..., Any], str] = weakref.WeakKeyDictionary()
#: What is around each call of a decorated function; it gets the guard, which is within.
around_decorated: Callable[[TrainGuard], AbstractContextManager[Any]] = nullcontext


@dataclass(eq=False)
class TrainGuard:
    """Context of one call of ``train``; see :func:`reentrant_train`.

    At entry, parameters are gathered if a former call broke off, sync functions that a former call installed
    are cleared, and the interval timer is reset if it was left running. During the call its thread may switch
    the chunks' forward pre-hooks in any order. At the end, garbage collection is enabled or disabled as it
    was at entry. After an exception, everything else that the call changed on config, modules, optimizer,
    timers and rerun state machine is as at entry too, outstanding collectives have been waited for, and
    bucket groups are reset; the exception propagates unchanged. The outermost call frees copies of gradients
    that the optimizer has left on main parameters.

    Calls may be nested, and may overlap in several threads. What a call that still runs has installed is left
    alone: on a config that both models share the assertion on ``no_sync_func`` fires, as it does unguarded.

    Args:
        model: list of model chunks, or one chunk.
        optimizer: the ``MegatronOptimizer``, if there is one. Without it, gradients on main parameters stay.
        timers: the framework's ``megatron.core.timers.Timers``, if it uses others than ``config.timers``.
        config: the config that the framework works with, if it is not the chunks' own.
        installs: whether the body installs ``no_sync_func``, which is then cleared at entry. Pass ``False``
            for a loop that relies on functions installed once by others (Megatron-Bridge): without them
            gradients would be reduced after every microbatch.
        warn: whether to look for settings that silently spoil reinforcement learning, and to warn once of
            each; see :func:`.training_warnings.reported`.
    """

    model: Any
    optimizer: Any = None
    timers: Any = None
    config: Any = None
    installs: bool = True
    warn: bool = True

    _calls: list[tuple[RunningCall, Watch | None]] = field(default_factory=list, init=False, repr=False)

    def __enter__(self) -> None:
        for function in [*before_calls]:
            function()
        model = as_chunks(self.model)
        # This may raise, so it comes before the first change: nobody calls __exit__ then.
        synchronize_interrupted(model, self.optimizer)
        router_replay.finish_clearing(model)
        call = RunningCall(model, self.optimizer, self.timers, self.config, self.installs)
        self._calls.append((call, Watch(model, self.optimizer, self.config) if self.warn else None))

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        call, watch = self._calls.pop()
        if watch is not None:
            watch.end(failed=error is not None)
        if error is None:
            for config in call.configs:
                found = call.found(config)["no_sync_func"]
                if config.no_sync_func is None and belongs_to(call.model, found, "no_sync_func"):
                    config.no_sync_func = found
                    _NOT_INSTALLED.log()
            call.end(failed=False)
            return
        clean_ups: Any = (call.end, True), (router_replay.clear, call.model), (recover, call.model, error)
        for clean_up, *arguments in clean_ups:
            try:
                clean_up(*arguments)
            except Exception as failure:
                # Only a warning, since the caller has to see the exception of the training step.
                _CLEAN_UP_FAILED.log(failure=one_line(failure))


@overload
def reentrant_train(target: Function, **options: Any) -> Function: ...
@overload
def reentrant_train(
    target: Any,
    *,
    optimizer: Any = None,
    timers: Any = None,
    config: Any = None,
    installs: bool = True,
    warn: bool = True,
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
            function, a method, a ``functools.partial`` that does not bind it by position, or an object with
            ``__call__`` that is no module.
        options: of :class:`TrainGuard`.

    Raises:
        MegatronRLPatchesError: the function has no parameter named ``model``, its body runs after the call (a
            generator or a coroutine function), or the target is a class, or neither chunks nor a function.
    """
    called = target.func if isinstance(target, functools.partial) else target
    if inspect.isclass(called):
        problem = "is a class; decorate the method that takes the model chunks as 'model'"
        raise MegatronRLPatchesError(f"{called.__qualname__} {problem}")
    if not callable(target) or hasattr(target, "modules"):
        chunks = as_chunks(target)
        for chunk in chunks:
            if not hasattr(chunk, "modules") and config_of(chunk) is None:
                raise MegatronRLPatchesError(
                    f"{type(chunk).__qualname__} is no model chunk, since it has neither modules nor a "
                    "config; give the list of model chunks, or a function that takes it as 'model'"
                )
        return TrainGuard(chunks, **options)
    called = called if inspect.isroutine(called) else type(called).__call__
    signature = _signature_with_model(target, called)

    # A function's attributes are copied to the wrapper. An object's attributes are its own state and are not.
    @functools.wraps(target, updated=("__dict__",) if inspect.isroutine(target) else ())
    def train(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        of_call = {"optimizer": call.arguments.get("optimizer"), **options}
        guard = TrainGuard(call.arguments["model"], **of_call)
        with around_decorated(guard), guard:
            return target(*args, **kwargs)

    body = inspect.unwrap(called)
    decorated[train] = f"{body.__module__}.{body.__qualname__}"
    return train


def _signature_with_model(target: Any, called: Any) -> inspect.Signature:
    """Return the signature of a function, or a partial of it, that takes the model chunks as ``model``."""
    name = getattr(inspect.unwrap(called), "__qualname__", repr(target))

    def refusal(reason: str) -> MegatronRLPatchesError:
        return MegatronRLPatchesError(f"{reason}; use 'with reentrant_train(model):' inside it instead")

    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError) as error:
        raise refusal(f"{name} has no signature that Python can tell") from error
    parameter = signature.parameters.get("model")
    if parameter is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise refusal(f"{name}{signature} has no parameter named 'model' that takes the list of model chunks")
    runs_later = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
    if any(does(called) for does in runs_later):
        raise refusal(f"{name} is a generator or a coroutine function, whose body runs after the call")
    return signature
