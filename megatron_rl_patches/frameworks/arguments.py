"""What adapters need: functions of this package by name, and the arguments of a call by name."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any


def calls(path: str) -> Callable[..., Any]:
    """Return an adapter that passes its calls on to a function of this package.

    Args:
        path: ``"module.function"``, imported when called; it gets ``(wrapped, args, kwargs)``.
    """
    module, _, name = path.partition(".")

    def adapter(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        return function(wrapped, args, kwargs)

    return adapter


def bind(
    wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, defaults: bool = False
) -> inspect.BoundArguments:
    """Return the arguments by name; with ``defaults`` also those that the caller left out."""
    # The signature of a method is not cached: the key of the cache would keep the instance alive.
    signature = _signature(wrapped) if inspect.isfunction(wrapped) else inspect.signature(wrapped)
    bound = signature.bind(*args, **kwargs)
    if defaults:
        bound.apply_defaults()
    return bound


def call(wrapped: Callable[..., Any], bound: inspect.BoundArguments, **changes: Any) -> Any:
    """Call the target with some arguments changed."""
    changed = inspect.BoundArguments(bound.signature, OrderedDict(bound.arguments, **changes))
    return wrapped(*changed.args, **changed.kwargs)


@functools.lru_cache(maxsize=128)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)
