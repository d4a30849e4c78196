"""The wrapper around a target, which is as good as invisible, and can be switched off wherever it is."""

from __future__ import annotations

import copy
import inspect
import pkgutil
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import wrapt

from .call import Call
from .patch import Site


class _BoundWrapper(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
    """The wrapper as accessed through an instance or a class: a method, or a plain function."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        owner = getattr(self.__wrapped__, "__self__", None)
        if owner is None:
            return self._self_parent.__reduce_ex__(protocol)
        return getattr, (owner, self.__name__)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = getattr(self.__wrapped__, "__self__", None)
        if owner is None or isinstance(owner, type):
            return self
        # Python copies bound methods alike: the same function, bound to a copy of the instance.
        copied = copy.deepcopy(owner, memo)
        return self._self_parent.__get__(copied, type(copied))


class SwitchableWrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """One adapter around one target, invisible to pickle, copy and inspect.

    ``switch(False)`` makes it inert wherever copies of it may live; ``path`` is the patch, module and
    qualified name of the target. It pickles by name, as the function that it wraps does, so a process
    without the patch, or without this package, gets the plain function. ``torch.compile`` looks through it:
    a compiled caller inlines the original, so no site may be a function that a framework compiles.
    """

    __bound_function_wrapper__ = _BoundWrapper
    # wrapt stores attributes with the prefix _self_ on the wrapper, and all others on the wrapped function.
    _self_switch: SimpleNamespace
    _self_path: tuple[str, str, str]
    _self_holder: Any

    def __init__(self, wrapped: Any, adapter: Callable[[Call], Any], site: Site, owner: Any) -> None:
        is_method = isinstance(owner, type) and not isinstance(wrapped, (staticmethod, classmethod))
        signature: inspect.Signature | None = None
        # Not an attribute of the wrapper: that would be a cycle, which holds the target after a revert.
        switch = SimpleNamespace(is_on=False)

        def signature_of(function: Any) -> inspect.Signature:
            nonlocal signature
            signature = signature or inspect.signature(function)  # the same for every instance
            return signature

        def call(function: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if is_method:
                # What is given for self may be an object of another class, as in tests of frameworks. wrapt
                # calls its adapters without an instance then, and before 1.17 as ever.
                if not isinstance(instance, owner):
                    return function(*args, **kwargs)
                # Where it was read from the class, it is a partial, whose signature is wrong before 2.5.
                if type(function) is not MethodType:
                    function = wrapped.__get__(instance, type(instance))
            return adapter(Call(function, args, kwargs, instance, signature_of))

        super().__init__(wrapped, call, lambda: switch.is_on)
        self._self_switch = switch
        self._self_path = (site.patch, site.module, site.qualname)
        self._self_holder = owner

    @property
    def path(self) -> tuple[str, str, str]:
        return self._self_path

    @property
    def owner(self) -> Any:
        """The module or class that held the target when it was wrapped."""
        return self._self_holder

    @property
    def is_on(self) -> bool:
        return bool(self._self_switch.is_on)

    def switch(self, on: bool) -> None:
        self._self_switch.is_on = on

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        _, module, qualname = self._self_path
        return pkgutil.resolve_name, (f"{module}:{qualname}",)

    def __deepcopy__(self, memo: object = None) -> Any:
        return self

    __copy__ = __deepcopy__


def is_patched(function: Any, patch: str) -> bool:
    """Return whether the function is the wrapper of this patch, in force and with no other around it."""
    return type(function) is SwitchableWrapper and function.is_on and function.path[0] == patch
