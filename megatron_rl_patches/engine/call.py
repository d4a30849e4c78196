"""One call of a patched function, as adapters get it."""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any


class Call:
    """A call of a patched function: ``call()`` runs the function, ``call(x=1)`` runs it with another ``x``.

    Attributes:
        wrapped: the function, bound if it is a method.
        instance: what it is bound to.
        options: what the patch was last applied with; an instance of the dataclass that it declares.
        args, kwargs: the arguments as they were passed.
    """

    def __init__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        self.wrapped, self.instance, self.args, self.kwargs = wrapped, instance, args, kwargs
        self.options: Any = None

    @property
    def passed(self) -> dict[str, Any]:
        """The arguments by name, without those that the caller left out."""
        return _signature(self.wrapped).bind(*self.args, **self.kwargs).arguments

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, with those that the caller left out."""
        bound = inspect.BoundArguments(_signature(self.wrapped), self.passed)
        bound.apply_defaults()
        return bound.arguments

    @property
    def changed(self) -> list[str]:
        """The names of the arguments that do not have their defaults."""
        parameters = _signature(self.wrapped).parameters
        return [name for name, value in self.arguments.items() if value is not parameters[name].default]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def __call__(self, **changes: Any) -> Any:
        if not changes:
            return self.wrapped(*self.args, **self.kwargs)
        bound = inspect.BoundArguments(_signature(self.wrapped), {**self.arguments, **changes})
        return self.wrapped(*bound.args, **bound.kwargs)


def adapter_at(path: str) -> Callable[[Call], Any]:
    """Return an adapter that imports ``"package.module:function"`` when it is first called."""
    function = functools.cache(lambda: pkgutil.resolve_name(path))
    return lambda call: function()(call)


def _signature(function: Any) -> inspect.Signature:
    return _cached(function) if inspect.isfunction(function) else inspect.signature(function)


_cached = functools.lru_cache(maxsize=128)(inspect.signature)
