"""The wrapper that we put around a target: switchable, and invisible to pickle, copy and inspect."""

from __future__ import annotations

import copy
import importlib
import operator
from typing import Any

import wrapt

from .spec import Adapter


class _BoundLayer(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return getattr, (self.__self__, self.__name__)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # As for a plain bound method: the copy is bound to the copy of its instance.
        return getattr(copy.deepcopy(self.__self__, memo), self.__name__)


class Layer(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """One adapter around one target.

    ``switch(False)`` makes it inert wherever copies of it may live. It pickles by name, as the function
    that it wraps does, so a process without the patch gets the plain function. ``torch.compile`` looks
    through it: a compiled caller inlines the original, so no site may be a function that a host compiles.
    """

    __bound_function_wrapper__ = _BoundLayer

    def __init__(self, wrapped: Any, adapter: Adapter, path: tuple[str, str]) -> None:
        switch = _Switch()
        super().__init__(wrapped, adapter, switch.is_on)
        self._self_switch = switch
        self._self_path = path

    @property
    def path(self) -> tuple[str, str]:
        """Module and qualified name of the target."""
        path: tuple[str, str] = self._self_path
        return path

    def switch(self, on: bool) -> None:
        self._self_switch.on = on

    @property
    def is_on(self) -> bool:
        on: bool = self._self_switch.on
        return on

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _by_name, self._self_path

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
