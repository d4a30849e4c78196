"""The arguments of a call by the names that its target gives them, for adapters."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any


def bind(
    wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, defaults: bool = False
) -> inspect.BoundArguments:
    """Arguments by name; with ``defaults`` those too that the caller left out."""
    # Of a method no signature is kept, since its key would keep the instance.
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
