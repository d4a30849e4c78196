"""The wrapper around a target, and the attribute that holds it.

Only this module, and :mod:`.copies` for the copies of a target, change foreign objects.
"""

from __future__ import annotations

import copy
import pkgutil
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import wrapt

from .spec import Adapter, Site
from .target_source import layers, resolve


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
    _self_on: bool
    _self_path: tuple[str, str, str]

    def __init__(self, wrapped: Any, adapter: Adapter, site: Site, owner: Any) -> None:
        is_method = isinstance(owner, type) and not isinstance(wrapped, (staticmethod, classmethod))

        def call(function: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if is_method:
                # What is given for self may be an object of another class, as in tests of frameworks. wrapt
                # calls its adapters without an instance then, and before 1.17 as ever.
                if not isinstance(instance, owner):
                    return function(*args, **kwargs)
                # Where it was read from the class, it is a partial, whose signature is wrong before 2.5.
                function = self.__wrapped__.__get__(instance, type(instance))
            return adapter(function, instance, args, kwargs)

        super().__init__(wrapped, call, lambda: self._self_on)
        self._self_on = False
        self._self_path = (site.patch, site.module, site.qualname)

    @property
    def path(self) -> tuple[str, str, str]:
        return self._self_path

    @property
    def is_on(self) -> bool:
        return self._self_on

    def switch(self, on: bool) -> None:
        self._self_on = on

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        _, module, qualname = self._self_path
        return pkgutil.resolve_name, (f"{module}:{qualname}",)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


@dataclass(eq=False)
class PatchedAttribute:
    """The attribute of a module or class (``owner``) that defines a target, and the wrapper for it."""

    site: Site
    owner: Any
    name: str
    wrapper: SwitchableWrapper

    @classmethod
    def of(cls, module: ModuleType, site: Site, adapter: Adapter) -> PatchedAttribute:
        """Make the wrapper, and change nothing yet."""
        owner, name = resolve(module, site.qualname)
        current = vars(owner)[name]
        wrapper = _find_disabled(current, site) or SwitchableWrapper(current, adapter, site, owner)
        return cls(site, owner, name, wrapper)

    @property
    def original(self) -> Any:
        return self.wrapper.__wrapped__

    def wrap(self) -> tuple[Any, Any]:
        """Put the wrapper in place; return what was there, and the wrapper."""
        if not self.is_in_place():
            setattr(self.owner, self.name, self.wrapper)
        self.wrapper.switch(True)
        return self.original, self.wrapper

    def is_in_place(self) -> bool:
        return any(layer is self.wrapper for layer in layers(self._current()[1]))

    def is_overwritten(self) -> bool:
        """Return whether the owner is still the same, but the name in it leads elsewhere."""
        return self._current()[0] is self.owner and not self.is_in_place()

    def reason_lost(self) -> str:
        owner, current = self._current()
        if current is None:
            return f"{self.site.target} is gone"
        if owner is not self.owner:
            return f"{self.site.module} was imported anew; call apply() again"
        home = f"{getattr(current, '__module__', '?')}.{getattr(current, '__qualname__', '?')}"
        return f"overwritten by {home}; in force only if that calls what it replaced"

    def unwrap(self) -> tuple[Any, Any]:
        """Put the original back; return the wrapper, and the original."""
        # The wrapper is switched off first, so that it is inert in calls of other threads and in copies that
        # cannot be reached.
        self.wrapper.switch(False)
        original = self.original
        # The original may be the wrapper of a patch that has been reverted before this one.
        while type(original) is SwitchableWrapper and not original.is_on:
            original = original.__wrapped__
        if vars(self.owner).get(self.name) is self.wrapper:
            setattr(self.owner, self.name, original)
        return self.wrapper, original

    def _current(self) -> tuple[Any, Any]:
        """Return the current owner of the target, and the target.

        After a reload the owner is not ``self.owner``.
        """
        try:
            owner, name = resolve(sys.modules[self.site.module], self.site.qualname)
            return owner, vars(owner)[name]
        except (KeyError, AttributeError):
            return None, None


def _find_disabled(current: Any, site: Site) -> SwitchableWrapper | None:
    """Return this site's wrapper that an earlier revert switched off but left under another wrapper."""
    path = (site.patch, site.module, site.qualname)
    own = (w for w in layers(current) if type(w) is SwitchableWrapper and w.path == path and not w.is_on)
    return next(own, None)
