"""The patches there are: files in ``patches/``, and those that other packages register."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, get_args, get_type_hints

from ..common.messages import Message
from ..errors import PatchError
from .patch import Patch, SelectedBy, third_party

ENTRY_POINT_GROUP = "megatron_rl_patches.patches"
#: Names that stand for several patches; each set contains the one before it.
DEFAULT, SETS = "default", ("default", "all")
#: What a user writes to switch a patch on, by :attr:`.Patch.selected_by`.
SELECTS = {"default": "1", "all": "all", "by name": "its name"}
# Options of patches cannot have these names, whose variables have a meaning of their own.
_RESERVED_OPTIONS = ("strict", "roots")
LEFT_OUT = Message(
    "a patch is left out: {error}",
    "This patch is not in place; the others are.",
    "Correct its options, or report this to the package that provides it.",
)


@cache
def patches() -> dict[str, Patch]:
    """Return all patches by name, built-in ones first; one that fails to load is reported and left out.

    Packages register theirs as entry points (``name = "package.module:patch"``).
    """
    package = importlib.import_module("megatron_rl_patches.patches")
    files = (name for _, name, _ in pkgutil.iter_modules(package.__path__))
    built_in = (importlib.import_module(f"{package.__name__}.{file}").patch for file in files)
    registered = {patch.name: patch for patch in built_in}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            with third_party(f"loading patch {entry.name} of {entry.value}"):
                patch = entry.load()
                if not isinstance(patch, Patch):
                    raise TypeError(f"expected a Patch, got {type(patch).__name__}")
                _check(patch, registered)
        except PatchError as error:
            LEFT_OUT.log(error=error)
        else:
            registered[patch.name] = patch
    return registered


def select(names: Collection[str] = (DEFAULT,), exclude: Collection[str] = ()) -> list[Patch]:
    """Return the patches of these names, or of the sets ``default`` and ``all``, minus ``exclude``."""
    exclude = (exclude,) if isinstance(exclude, str) else exclude
    known = patches()
    if wrong := [name for name in (*names, *exclude) if not isinstance(name, str)]:
        how = f"a package registers its patch as an entry point of {ENTRY_POINT_GROUP}"
        raise PatchError(f"expected the name of a patch, not a {type(wrong[0]).__name__}; {how}")
    if unknown := [name for name in names if name not in (*SETS, *known)]:
        raise PatchError(unknown_names(unknown))
    if unknown := [name for name in exclude if name not in known]:
        raise PatchError(f"exclude: {unknown_names(unknown, known)}")
    members = {name: (name,) for name in known} | {name: patches_of(name) for name in SETS}
    chosen = dict.fromkeys(patch for name in names for patch in members[name])
    return sorted((known[name] for name in chosen if name not in exclude), key=lambda patch: patch.last)


def patches_of(name: str) -> tuple[str, ...]:
    """Return the names of the patches in the set ``default``, or in ``all``, which contains it."""
    sets = SETS[: SETS.index(name) + 1]
    return tuple(patch.name for patch in patches().values() if patch.selected_by in sets)


def unknown_names(names: Collection[str], known: Iterable[str] = ()) -> str:
    """Return the message about names that are not known; by default those of patches and sets are."""
    return f"unknown patch {', '.join(map(repr, names))}; known: {', '.join(known or (*SETS, *patches()))}"


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
    """Raise ``ValueError`` if the patch cannot be registered together with the others."""
    if patch.name in (*SETS, *others):
        raise ValueError(f"a patch named {patch.name!r} exists already")
    if patch.selected_by not in get_args(SelectedBy):
        raise ValueError(f"selected_by is {patch.selected_by!r}; expected one of {get_args(SelectedBy)}")
    if patch.options is None:
        return
    names = field_types(patch.options)
    patch.options()  # raises unless every field has a default
    owners = {**dict.fromkeys(_RESERVED_OPTIONS), **option_types(others.values())}
    for name in names:
        if owners.get(name, patch.options) is not patch.options:
            raise ValueError(f"an option named {name!r} exists already")
