"""One layer in one place: put there, found again, taken away."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from .facts import layers, resolve
from .layer import Layer
from .spec import Adapter, Site


@dataclass
class Placement:
    """Where a layer sits.

    Attributes:
        owner: module or class that holds the target.
        inherited: the class had no entry of its own, so that taking the layer away deletes the entry.
    """

    site: Site
    owner: Any
    name: str
    original: Any
    inherited: bool
    layer: Layer
    _roots: tuple[str, ...] = field(default=())

    @classmethod
    def make(cls, module: ModuleType, site: Site, adapter: Adapter) -> Placement:
        """Wrap the target, and rebind the copies of it that modules of the host have made already."""
        owner, name = resolve(module, site.qualname)
        inherited = name not in vars(owner)
        original = _raw(owner, name)
        layer = _existing(original, site) or Layer(original, adapter, (site.module, site.qualname))
        placement = cls(site, owner, name, original, inherited, layer, _roots(site))
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
            if self.inherited:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self.original)
        self._rebind_copies(self.layer, self.original)

    def _current(self) -> Any:
        """What the target's name leads to now, which after a reload is not in ``owner``."""
        try:
            return _raw(*resolve(sys.modules[self.site.module], self.site.qualname))
        except (KeyError, AttributeError):
            return None

    def _rebind_copies(self, old: Any, new: Any) -> None:
        if not isinstance(self.owner, ModuleType):
            return
        for module_name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and module_name.partition(".")[0] in self._roots:
                for name, value in list(vars(module).items()):
                    if value is old:
                        setattr(module, name, new)


def _roots(site: Site) -> tuple[str, ...]:
    return (site.module.partition(".")[0], *site.copied_by)


def _raw(owner: Any, name: str) -> Any:
    """The entry itself, not what its descriptor makes of it."""
    for holder in (owner, *getattr(owner, "__mro__", ())):
        if name in vars(holder):
            return vars(holder)[name]
    return getattr(owner, name)


def _existing(target: Any, site: Site) -> Layer | None:
    """A layer of ours that an earlier revert left, inert, under somebody else's."""
    for layer in layers(target):
        if type(layer) is Layer and layer.path == (site.module, site.qualname):
            return layer
    return None


