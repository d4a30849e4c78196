"""Calls back when a module has been imported completely; never imports one itself."""

from __future__ import annotations

from typing import Protocol

from _megatron_rl_patches_startup import finder


class Listener(Protocol):
    """What is called at the end of imports."""

    def loaded(self, module_name: str) -> None:
        """A watched module has just been imported; an exception makes that import fail."""

    def import_ended(self) -> None:
        """The import of a module that was imported half when it was watched has ended."""


def watch(module_name: str, listener: Listener) -> None:
    """Call the listener whenever the module is imported, imported again or reloaded."""
    finder.watch(module_name, listener)  # type: ignore[no-untyped-call]


def is_imported(module_name: str) -> bool:
    """Return whether the module has been imported completely; while its listeners are called, it counts."""
    return bool(finder.is_imported(module_name))  # type: ignore[no-untyped-call]
