"""The patches there are: files in ``patches/``, and those that other packages register."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, get_type_hints

from ..errors import PatchError
from .patch import Patch, third_party

ENTRY_POINT_GROUP = "megatron_rl_patches.patches"
# Options of patches cannot have these names, whose variables have a meaning of their own.
_RESERVED_OPTIONS = ("strict", "roots")
_log = logging.getLogger("megatron_rl_patches")


@cache
def patches() -> dict[str, Patch]:
    """Return all registered patches by name, built-in ones first.

    Packages register theirs as entry points (``name = "package.module:patch"``). One that fails to load is
    reported and left out.
    """
    registered = {patch.name: patch for patch in _built_in()}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            with third_party(f"loading patch {entry.name} of {entry.value}"):
                patch = entry.load()
                if not isinstance(patch, Patch):
                    raise TypeError(f"expected a Patch, got {type(patch).__name__}")
                _check(patch, registered)
        except PatchError as error:
            _log.warning("megatron_rl_patches: %s; going on without it", error)
        else:
            registered[patch.name] = patch
    return registered


def select(names: Collection[str], exclude: Collection[str] = ()) -> list[Patch]:
    """Return the named patches (without names: all but explicit ones), minus ``exclude``."""
    exclude = (exclude,) if isinstance(exclude, str) else exclude
    known = patches()
    unknown = [name for name in (*names, *exclude) if name not in known]
    if unknown:
        raise PatchError(unknown_names(unknown))
    chosen = names or [name for name, patch in known.items() if not patch.explicit]
    selected = [known[name] for name in dict.fromkeys(chosen) if name not in exclude]
    return sorted(selected, key=lambda patch: patch.last)


def unknown_names(names: Collection[str]) -> str:
    """Return the message about names that no patch has."""
    return f"unknown patch {', '.join(map(repr, names))}; known: {', '.join(patches())}"


def option_types(among: Iterable[Patch] | None = None) -> dict[str, type]:
    """Return the dataclass that declares an option, by the option's name; by default for all patches."""
    declared = (patch.options for patch in (patches().values() if among is None else among))
    return {name: options for options in declared if options is not None for name in field_types(options)}


def field_types(options: Any) -> dict[str, Any]:
    """Return the type of every field of a dataclass, by the field's name; ``TypeError`` if it is none."""
    if not (isinstance(options, type) and is_dataclass(options)):
        raise TypeError(f"options are declared as a dataclass, not as {options!r}")
    types = get_type_hints(options)
    return {field.name: types[field.name] for field in fields(options)}


def _check(patch: Patch, others: Mapping[str, Patch]) -> None:
    """Raise ``ValueError`` if the patch cannot be registered beside the others."""
    if patch.name in others:
        raise ValueError(f"a patch named {patch.name!r} exists already")
    if patch.options is None:
        return
    names = field_types(patch.options)
    patch.options()  # raises unless every field has a default
    owners = {**dict.fromkeys(_RESERVED_OPTIONS), **option_types(others.values())}
    for name in names:
        if owners.get(name, patch.options) is not patch.options:
            raise ValueError(f"an option named {name!r} exists already")


def _built_in() -> list[Patch]:
    package = importlib.import_module("megatron_rl_patches.patches")
    return [
        importlib.import_module(f"{package.__name__}.{module.name}").patch
        for module in pkgutil.iter_modules(package.__path__)
        if not module.name.startswith("_")
    ]
