"""The wrapper around a target, and the attribute that holds it. Only this module changes foreign objects."""

from __future__ import annotations

import copy
import pkgutil
import sys
from contextlib import suppress
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
    without the patch, or without this package, gets the plain function. ``torch.compile`` looks through it: a compiled caller inlines
    the original, so no site may be a function that a framework compiles.
    """

    __bound_function_wrapper__ = _BoundWrapper
    # wrapt stores attributes with the prefix _self_ on the wrapper, and all others on the wrapped function.
    _self_on: bool
    _self_path: tuple[str, str, str]

    def __init__(self, wrapped: Any, adapter: Adapter, site: Site) -> None:
        super().__init__(wrapped, adapter, lambda: self._self_on)
        self._self_on = True
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


@dataclass
class PatchedAttribute:
    """The attribute of a module or class (``owner``) that defines a target, and the wrapper put there."""

    site: Site
    owner: Any
    name: str
    original: Any
    wrapper: SwitchableWrapper

    @classmethod
    def wrap(cls, module: ModuleType, site: Site, adapter: Adapter) -> PatchedAttribute:
        """Wrap the target, and rebind the copies of it that modules of the framework have made already."""
        owner, name = resolve(module, site.qualname)
        current = vars(owner)[name]
        if isinstance(owner, type) and not isinstance(current, (staticmethod, classmethod)):
            adapter = _for_instances(owner, current, adapter)
        wrapper = _find_disabled(current, site) or SwitchableWrapper(current, adapter, site)
        attribute = cls(site, owner, name, wrapper.__wrapped__, wrapper)
        if not attribute.is_in_place():
            setattr(owner, name, wrapper)
        attribute._rebind_copies(attribute.original, wrapper)
        wrapper.switch(True)
        return attribute

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

    def unwrap(self) -> None:
        """Put the original back; a copy that cannot be reached is inert afterwards."""
        # The wrapper is switched off first, so that it is inert in calls of other threads and in copies that
        # cannot be reached.
        self.wrapper.switch(False)
        original = self.original
        # The original may be the wrapper of a patch that has been reverted before this one.
        while type(original) is SwitchableWrapper and not original.is_on:
            original = original.__wrapped__
        if vars(self.owner).get(self.name) is self.wrapper:
            setattr(self.owner, self.name, original)
        self._rebind_copies(self.wrapper, original)

    def _current(self) -> tuple[Any, Any]:
        """Return the current owner of the target, and the target.

        After a reload the owner is not ``self.owner``.
        """
        try:
            owner, name = resolve(sys.modules[self.site.module], self.site.qualname)
            return owner, vars(owner)[name]
        except (KeyError, AttributeError):
            return None, None

    def _rebind_copies(self, old: Any, new: Any) -> None:
        if not isinstance(self.owner, ModuleType):
            return
        roots = (self.site.module.partition(".")[0], *self.site.reexported_by)
        for module_name, module in list(sys.modules.items()):
            if not isinstance(module, ModuleType) or module_name.partition(".")[0] not in roots:
                continue
            for name in [name for name, value in list(vars(module).items()) if value is old]:
                # A module that refuses keeps the old function, like other copies that cannot be reached.
                with suppress(Exception):
                    setattr(module, name, new)


def _for_instances(owner: type, function: Any, adapter: Adapter) -> Adapter:
    """Return an adapter for a method, which runs the original for an object that is no instance of the owner.

    wrapt gives such a call to its adapters as one without an instance, and before 1.17 as any other. What it
    gives as the function, where that was read from the class, is a partial whose signature is wrong before 2.5.
    """

    def of_method(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(instance, owner):
            return adapter(function.__get__(instance, type(instance)), instance, args, kwargs)
        return wrapped(*args, **kwargs)

    return of_method


def _find_disabled(current: Any, site: Site) -> SwitchableWrapper | None:
    """Return this site's wrapper that an earlier revert switched off but left under another wrapper."""
    path = (site.patch, site.module, site.qualname)
    own = (w for w in layers(current) if type(w) is SwitchableWrapper and w.path == path and not w.is_on)
    return next(own, None)
