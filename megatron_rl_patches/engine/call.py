"""One call of a patched function, as an adapter gets it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """A call of a patched function: ``call()`` runs the function, ``call(model=x)`` with another ``model``.

    ``call["model"]`` is the argument of that name, whether the caller passed it by name, by position or, as
    the function has a default for it, not at all.

    Attributes:
        function: the original, which is bound to ``instance`` if it is a method.
        args, kwargs: the arguments that the caller passed by position, and by name.
        instance: the object whose method is called; ``None`` for a function.
        signature_of: returns the signature of the function.
        options: an instance of the dataclass that the patch declares, as the patch was last applied with it.
    """

    # A patched function may take microseconds, so nothing is computed before an adapter asks for it.
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    instance: Any = None
    signature_of: Callable[[Any], inspect.Signature] = inspect.signature
    options: Any = None
    _arguments: dict[str, Any] | None = field(default=None, init=False)

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
        parameters = self.signature_of(self.function).parameters
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
        return self.signature_of(self.function).bind(*self.args, **self.kwargs)
