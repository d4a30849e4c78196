"""Calls back when a module has been imported completely; never imports one itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt


class ImportHooks:
    """Calls ``loaded(module_name)`` at the end of the import of a watched module.

    Python offers no call-back for an import that had begun before the module was watched. :class:`_Observer`
    looks at such modules whenever anything else is imported, and calls ``import_ended()``.
    """

    def __init__(self, loaded: Callable[[str], None], import_ended: Callable[[], None]) -> None:
        self._loaded = loaded
        self._hooked: set[str] = set()
        self._observer = _Observer(import_ended)

    def watch(self, module_name: str) -> None:
        """Have ``loaded`` called when the module is imported; do nothing if it is imported already."""
        if module_name in sys.modules:
            if not is_imported(module_name):
                self._observer.add(module_name)
        elif module_name not in self._hooked:
            self._hook(module_name)

    def _hook(self, module_name: str) -> None:
        self._hooked.add(module_name)
        registering = True

        def fire(module: ModuleType) -> None:
            self._hooked.discard(module_name)
            # wrapt fires at once for a module that another thread has begun to import meanwhile.
            if registering and _is_initializing(module):
                self._observer.add(module_name)
            else:
                self._loaded(module_name)

        wrapt.register_post_import_hook(fire, module_name)
        registering = False


class _Observer:
    """A meta path entry that finds no module, and checks at any import whether awaited imports have ended."""

    def __init__(self, import_ended: Callable[[], None]) -> None:
        self._import_ended = import_ended
        self._names: set[str] = set()

    def add(self, module_name: str) -> None:
        self._names.add(module_name)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        # It stays on sys.meta_path, since removing it would shift that list under other threads.
        if self._names and (ended := {name for name in list(self._names) if is_imported(name)}):
            self._names -= ended
            self._import_ended()


def is_imported(module_name: str) -> bool:
    """Return whether the module has been imported completely."""
    module = sys.modules.get(module_name)
    return module is not None and not _is_initializing(module)


def _is_initializing(module: ModuleType | None) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
