"""The patches there are: files in ``patches/``, and those that other packages register."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Collection
from functools import cache
from importlib.metadata import entry_points

from ..errors import PatchError
from .spec import Patch

ENTRY_POINT_GROUP = "megatron_rl_patches.patches"
_log = logging.getLogger("megatron_rl_patches")


@cache
def patches() -> dict[str, Patch]:
    """All registered patches by name, built-in ones first.

    A package registers its own under the entry-point group ``megatron_rl_patches.patches``
    (``name = "package.module:patch"``). One that fails to load is reported and left out.
    """
    found = {patch.name: patch for patch in _built_in()}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            patch = entry.load()
            if not isinstance(patch, Patch):
                raise TypeError(f"expected a Patch, got {type(patch).__name__}")
            if patch.name in found:
                raise ValueError(f"a patch named {patch.name!r} exists already")
        except Exception as error:
            _log.warning("patch %s of %s could not be loaded: %s", entry.name, entry.value, error)
        else:
            found[patch.name] = patch
    return found


def select(names: Collection[str], exclude: Collection[str] = (), also: Collection[str] = ()) -> list[Patch]:
    """The named patches, or when no name is given all of them but the explicit ones, and ``also``.

    Raises:
        PatchError: a name that no patch has; the message lists those there are.
    """
    if isinstance(exclude, str):
        exclude = (exclude,)
    known = patches()
    unknown = [name for name in (*names, *also, *exclude) if name not in known]
    if unknown:
        raise PatchError(unknown_names(unknown))
    chosen = dict.fromkeys((*(names or (n for n, patch in known.items() if not patch.explicit)), *also))
    return [known[name] for name in chosen if name not in exclude]


def unknown_names(names: Collection[str]) -> str:
    """What to tell of names that no patch has."""
    return f"unknown patch {', '.join(map(repr, names))}; known: {', '.join(patches())}"


def _built_in() -> list[Patch]:
    package = importlib.import_module("megatron_rl_patches.patches")
    return [
        importlib.import_module(f"{package.__name__}.{module.name}").patch
        for module in pkgutil.iter_modules(package.__path__)
        if not module.name.startswith("_")
    ]
