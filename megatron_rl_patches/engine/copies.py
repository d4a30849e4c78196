"""Copies of a function that other modules have made: ``from module import function``, tables, closures."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import CellType, FrameType, ModuleType, SimpleNamespace
from typing import Any

_HOLDERS_DEEP = 3


def rebind(
    moves: Sequence[tuple[Any, Any]], is_searched: Callable[[str], bool] = lambda module: True
) -> None:
    """Have every module that holds an old function under some name hold the new one, found by identity.

    Args:
        moves: pairs of an old and a new function, one after the other; the new one of a pair may be the old
            one of a later pair.
        is_searched: whether the module of this name may have a copy.
    """
    final: dict[int, tuple[Any, Any]] = {}  # the old function is kept, so that its id stays its own
    for old, new in moves:
        for first, (kept, last) in final.items():
            if last is old:
                final[first] = kept, new
        final.setdefault(id(old), (old, new))
    if not final:
        return
    for module_name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or not is_searched(module_name):
            continue
        for name in [name for name, value in list(vars(module).items()) if id(value) in final]:
            # A module that refuses keeps the old function, like other copies that cannot be reached.
            with suppress(Exception):
                setattr(module, name, final[id(vars(module)[name])][1])


def out_of_reach(wrapper: Any) -> list[str]:
    """Name what holds the function that a wrapper has taken the place of, besides the wrapper."""
    # Most functions have no copies. Then the search through everything in memory is not needed.
    held_once = SimpleNamespace(__wrapped__=object())
    if sys.getrefcount(wrapper.__wrapped__) <= sys.getrefcount(held_once.__wrapped__):
        return []
    function = getattr(wrapper.__wrapped__, "__func__", wrapper.__wrapped__)  # of a static or class method
    names = set()
    for holder in _holders(function):
        if type(holder) not in (type(wrapper), staticmethod, classmethod):
            names.add(_name_of(holder, function, _HOLDERS_DEEP))
    return sorted(names)


def _holders(value: Any) -> list[Any]:
    return [each for each in gc.get_referrers(value) if not isinstance(each, FrameType)]


def _name_of(holder: Any, value: Any, steps: int) -> str:
    """Return the name of an object that holds the value, or of what holds that object."""
    if inspect.isfunction(holder):
        return f"{holder.__module__}.{holder.__qualname__}"
    if isinstance(holder, dict) and (module := holder.get("__module__", holder.get("__name__"))):
        key = next((key for key, held in holder.items() if held is value), "?")
        return f"{module}.{key}"  # an attribute of a module, or of a class in it
    kind = {CellType: "closure"}.get(type(holder), type(holder).__name__)
    above = [each for each in _holders(holder) if _has_a_name(each, holder)] if steps else []
    outer = next((name for each in above if "." in (name := _name_of(each, holder, steps - 1))), "")
    return f"a {kind}" + (f" of {outer.removeprefix('a tuple of ')}" if outer else "")


def _has_a_name(holder: Any, value: Any) -> bool:
    return (not isinstance(holder, FrameType) and isinstance(holder, dict | list | tuple | set)) or (
        inspect.isfunction(holder) and value in (holder.__closure__, holder.__defaults__, vars(holder))
    )
