"""Calls back when a module has been imported completely; never imports one itself."""

from __future__ import annotations

from _megatron_rl_patches_startup import Listener, finder

__all__ = ["Listener", "forget", "is_imported", "watch"]


def watch(module_name: str, listener: Listener) -> None:
    """Call the listener whenever the module is imported, imported again or reloaded."""
    finder.watch(module_name, listener)


def forget(module_name: str, listener: Listener) -> None:
    """Call the listener no longer."""
    finder.forget(module_name, listener)


def is_imported(module_name: str) -> bool:
    """Return whether the module has been imported completely; while its listeners are called, it counts."""
    return finder.is_imported(module_name)
