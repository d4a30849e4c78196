"""Tells when a module has been imported completely; never imports one itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt


class ImportHooks:
    """Calls ``loaded(module_name)`` at the end of the import of a watched module.

    Nothing calls back at the end of an import that had begun before: of such a module the next import of
    anything tells, through :class:`_Observer`.
    """

    def __init__(self, loaded: Callable[[str], None], settle: Callable[[], None]) -> None:
        self._loaded = loaded
        self._hooked: set[str] = set()
        self._observer = _Observer(settle)

    def watch(self, module_name: str) -> None:
        """Have ``loaded`` called when the module is imported; nothing to do if it is."""
        if is_loaded(module_name):
            return
        if module_name in sys.modules:
            self._observer.add(module_name)
        elif module_name not in self._hooked:
            self._hook(module_name)

    def watch_again(self, module_name: str) -> None:
        """Called from a hook that is about to fail the import: the next attempt shall meet a hook, too."""
        module = sys.modules.get(module_name)
        if not _is_initializing(module):
            return
        # wrapt would call the hook at once for a module that it sees; while the hook of the failing import
        # runs, this thread holds the module's import lock, so that no other can miss the entry.
        del sys.modules[module_name]
        try:
            self._hook(module_name)
        finally:
            sys.modules[module_name] = module  # type: ignore[assignment]

    def _hook(self, module_name: str) -> None:
        self._hooked.add(module_name)
        registering = True

        def fire(module: ModuleType) -> None:
            self._hooked.discard(module_name)
            # A module that another thread has begun to import meanwhile: wrapt fires at once.
            if registering and _is_initializing(module):
                self._observer.add(module_name)
            else:
                self._loaded(module_name)

        wrapt.register_post_import_hook(fire, module_name)
        registering = False


class _Observer:
    """A meta path entry that finds nothing: any import makes us look whether those we wait for have ended."""

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = settle
        self._names: set[str] = set()

    def add(self, module_name: str) -> None:
        self._names.add(module_name)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        # Stays on sys.meta_path when idle: removing it would shift that list under threads that walk it.
        if self._names and (ended := {name for name in list(self._names) if is_loaded(name)}):
            self._names -= ended
            self._settle()


def is_loaded(module_name: str) -> bool:
    """Imported, and not half-way."""
    module = sys.modules.get(module_name)
    return module is not None and not _is_initializing(module)


def _is_initializing(module: ModuleType | None) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
