"""One layer in one place: put there, found again, taken away."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .facts import layers, resolve
from .layer import Layer
from .spec import Adapter, Site


@dataclass
class Placement:
    """Where a layer sits: in a module or class (``owner``) that defines the target."""

    site: Site
    owner: Any
    name: str
    original: Any
    layer: Layer

    @classmethod
    def make(cls, patch: str, module: ModuleType, site: Site, adapter: Adapter) -> Placement:
        """Wrap the target, and rebind the copies of it that modules of the host have made already."""
        owner, name = resolve(module, site.qualname)
        top = vars(owner)[name]
        layer = _inert(top, patch, site) or Layer(top, adapter, patch, site.module, site.qualname)
        placement = cls(site, owner, name, layer.__wrapped__, layer)
        if not placement.in_place():
            setattr(owner, name, layer)
        placement._rebind_copies(placement.original, layer)
        layer.switch(True)
        return placement

    def in_place(self) -> bool:
        return any(layer is self.layer for layer in layers(self._current()))

    def is_overwritten(self) -> bool:
        """The owner is still the one, but the name in it leads elsewhere."""
        try:
            owner, _ = resolve(sys.modules[self.site.module], self.site.qualname)
        except (KeyError, AttributeError):
            return False
        return owner is self.owner and not self.in_place()

    def why_lost(self) -> str:
        current = self._current()
        if current is None:
            return f"{self.site.target} is gone"
        if not self.is_overwritten():
            return f"{self.site.module} was imported anew; call apply() again"
        home = f"{getattr(current, '__module__', '?')}.{getattr(current, '__qualname__', '?')}"
        return f"overwritten by {home}; in force only if that calls what it replaced"

    def take_away(self) -> None:
        # Off first: a call in another thread, or a copy that cannot be reached, meets an inert layer.
        self.layer.switch(False)
        original = self.original
        while type(original) is Layer and not original.is_on:  # of a patch that was reverted before this one
            original = original.__wrapped__
        if vars(self.owner).get(self.name) is self.layer:
            setattr(self.owner, self.name, original)
        self._rebind_copies(self.layer, original)

    def _current(self) -> Any:
        """What the target's name leads to now, which after a reload is not in ``owner``."""
        try:
            owner, name = resolve(sys.modules[self.site.module], self.site.qualname)
            return vars(owner)[name]
        except (KeyError, AttributeError):
            return None

    def _rebind_copies(self, old: Any, new: Any) -> None:
        if not isinstance(self.owner, ModuleType):
            return
        roots = (self.site.module.partition(".")[0], *self.site.copied_by)
        for module_name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and module_name.partition(".")[0] in roots:
                for name, value in list(vars(module).items()):
                    if value is old:
                        # A module that refuses is one more place that cannot be reached.
                        with suppress(Exception):
                            setattr(module, name, new)


def _inert(top: Any, patch: str, site: Site) -> Layer | None:
    """The patch's own layer that an earlier revert left, switched off, under somebody else's."""
    for layer in layers(top):
        if type(layer) is Layer and layer.path == (patch, site.module, site.qualname) and not layer.is_on:
            return layer
    return None
