"""One layer in one place: put there, found again, taken away."""

from __future__ import annotations

import sys
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
    def make(cls, module: ModuleType, site: Site, adapter: Adapter) -> Placement:
        """Wrap the target, and rebind the copies of it that modules of the host have made already."""
        owner, name = resolve(module, site.qualname)
        original = vars(owner)[name]
        layer = _existing(original, site) or Layer(original, adapter, (site.module, site.qualname))
        placement = cls(site, owner, name, original, layer)
        if not placement.in_place():
            setattr(owner, name, layer)
            placement._rebind_copies(original, layer)
        layer.switch(True)
        return placement

    def in_place(self) -> bool:
        current = self._current()
        return any(layer is self.layer for layer in layers(current))

    def why_lost(self) -> str:
        try:
            owner, _ = resolve(sys.modules[self.site.module], self.site.qualname)
        except (KeyError, AttributeError):
            return f"{self.site.target} is gone"
        if owner is not self.owner:
            return f"{self.site.module} was reloaded; call apply() again"
        current = self._current()
        home = f"{getattr(current, '__module__', '?')}.{getattr(current, '__qualname__', '?')}"
        return f"overwritten by {home}; call apply() after it"

    def take_away(self) -> None:
        # Off first: a call in another thread, or a copy that cannot be reached, meets an inert layer.
        self.layer.switch(False)
        if vars(self.owner).get(self.name) is self.layer:
            setattr(self.owner, self.name, self.original)
        self._rebind_copies(self.layer, self.original)

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
                        setattr(module, name, new)


def _existing(target: Any, site: Site) -> Layer | None:
    """A layer of ours that an earlier revert left, inert, under somebody else's."""
    for layer in layers(target):
        if type(layer) is Layer and layer.path == (site.module, site.qualname):
            return layer
    return None
