"""The wrapper that we put around a target: switchable, and invisible to pickle, copy and inspect."""

from __future__ import annotations

import copy
import importlib
import operator
from typing import Any

import wrapt

from .spec import Adapter


class _BoundLayer(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
    """What reading the layer from an instance or a class gives: a method, or a plain function."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        owner = getattr(self.__wrapped__, "__self__", None)
        if owner is None:
            return self._self_parent.__reduce_ex__(protocol)
        return getattr, (owner, self.__name__)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = getattr(self.__wrapped__, "__self__", None)
        # As for a plain bound method: the copy is bound to the copy of its instance.
        return self if owner is None else getattr(copy.deepcopy(owner, memo), self.__name__)


class Layer(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """One adapter around one target.

    ``switch(False)`` makes it inert wherever copies of it may live. It pickles by name, as the function
    that it wraps does, so a process without the patch gets the plain function. ``torch.compile`` looks
    through it: a compiled caller inlines the original, so no site may be a function that a host compiles.
    """

    __bound_function_wrapper__ = _BoundLayer

    def __init__(self, wrapped: Any, adapter: Adapter, patch: str, module: str, qualname: str) -> None:
        switch = _Switch()
        super().__init__(wrapped, adapter, switch.is_on)
        self._self_switch = switch
        self._self_path = (patch, module, qualname)

    @property
    def path(self) -> tuple[str, str, str]:
        """Patch, module and qualified name of the target."""
        path: tuple[str, str, str] = self._self_path
        return path

    def switch(self, on: bool) -> None:
        self._self_switch.on = on

    @property
    def is_on(self) -> bool:
        on: bool = self._self_switch.on
        return on

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _by_name, self._self_path[1:]

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class _Switch:
    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = True

    def is_on(self) -> bool:
        return self.on


def _by_name(module: str, qualname: str) -> Any:
    return operator.attrgetter(qualname)(importlib.import_module(module))
