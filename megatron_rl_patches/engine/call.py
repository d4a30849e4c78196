"""One call of a patched function, as an adapter gets it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

Signature = inspect.Signature


class Call:
    """A call of a patched function: ``call()`` runs the function, ``call(model=x)`` with another ``model``.

    ``call["model"]`` is the argument of that name, whether the caller passed it by name, by position or, as
    the function has a default for it, not at all.

    Attributes:
        function: the original, which is bound to ``instance`` if it is a method.
        instance: the object whose method is called; ``None`` for a function.
        args: the arguments that the caller passed by position.
        kwargs: the arguments that the caller passed by name.
        options: an instance of the dataclass that the patch declares, as the patch was last applied with it.
    """

    __slots__ = ("_arguments", "_signature_of", "args", "function", "instance", "kwargs", "options")

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        instance: Any = None,
        signature_of: Callable[[Any], Signature] = inspect.signature,
        options: Any = None,
    ) -> None:
        # A patched function may take microseconds, so nothing is computed here.
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.instance = instance
        self.options = options
        self._signature_of = signature_of
        self._arguments: dict[str, Any] | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name, defaults included. Changing the dictionary does not change the call."""
        if self._arguments is None:
            bound = self._bound()
            bound.apply_defaults()
            self._arguments = bound.arguments
        return self._arguments

    def passed(self) -> dict[str, Any]:
        """Return by name the arguments that the caller passed."""
        return self._bound().arguments

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the argument, or the default where the function has no parameter of that name."""
        return self.arguments.get(name, default)

    def changed(self) -> set[str]:
        """Return the names of the arguments that are not the function's defaults."""
        parameters = self._signature_of(self.function).parameters
        return {name for name, value in self.arguments.items() if value is not parameters[name].default}

    def __call__(self, **changes: Any) -> Any:
        """Run the original with the arguments of the call, some of them changed.

        Raises:
            TypeError: the function has no parameter of a name that is changed.
        """
        if not changes:
            return self.function(*self.args, **self.kwargs)
        bound = self._bound()
        if unknown := changes.keys() - bound.signature.parameters.keys():
            raise TypeError(f"{self.function!r} has no parameter {', '.join(sorted(unknown))}")
        bound.arguments.update(changes)
        return self.function(*bound.args, **bound.kwargs)

    def _bound(self) -> inspect.BoundArguments:
        return self._signature_of(self.function).bind(*self.args, **self.kwargs)
