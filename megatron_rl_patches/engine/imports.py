"""Calls back when a module has been imported completely; never imports one itself."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt


class ImportHooks:
    """``settle(module_name)`` runs once for every watched module, at the end of its import.

    A module that is half imported at the time of watching is settled at the next import of anything, or
    the next time the engine is asked: nothing calls back at the end of an import that has already begun.
    """

    def __init__(self, settle: Callable[[str], None]) -> None:
        self._settle = settle
        self._watched: set[str] = set()
        self._half_imported = _HalfImported(self.settle_half_imported)
        self._lock = threading.Lock()

    def watch(self, module_name: str) -> None:
        with self._lock:
            if module_name in self._watched and module_name not in sys.modules:
                return
            self._watched.add(module_name)
        registering = True

        def loaded(module: ModuleType) -> None:
            # wrapt fires at once for a module in sys.modules, be it complete or not; otherwise at the end of
            # its execution, when the import system still marks it as initializing.
            if registering and _is_initializing(module):
                self._half_imported.add(module_name)
            else:
                self._settle(module_name)

        wrapt.register_post_import_hook(loaded, module_name)
        registering = False

    def watch_again(self, module_name: str) -> None:
        """Called from a hook that is about to fail the import: the next attempt shall meet a hook, too."""
        module = sys.modules.get(module_name)
        if not _is_initializing(module):
            return
        # wrapt would call the hook at once for a module that it sees; while the hook of the failing import
        # runs, this thread holds the module's import lock, so that no other can miss the entry.
        del sys.modules[module_name]
        try:
            wrapt.register_post_import_hook(lambda _: self._settle(module_name), module_name)
        finally:
            sys.modules[module_name] = module  # type: ignore[assignment]

    def settle_half_imported(self) -> None:
        for module_name in self._half_imported.completed():
            self._settle(module_name)

    def module(self, module_name: str) -> ModuleType:
        return sys.modules[module_name]


class _HalfImported:
    """A meta path entry that finds nothing: any import tells us to look whether ours have ended."""

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = settle
        self._names: set[str] = set()

    def add(self, module_name: str) -> None:
        self._names.add(module_name)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def completed(self) -> list[str]:
        names = [n for n in list(self._names) if n in sys.modules and not _is_initializing(sys.modules[n])]
        self._names.difference_update(names)
        return names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        # Stays on sys.meta_path when idle: removing it would shift that list under threads that walk it.
        if self._names:
            self._settle()


def _is_initializing(module: ModuleType | None) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
