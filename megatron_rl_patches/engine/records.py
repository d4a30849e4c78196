"""A selected site: what became of it, the attribute that holds its target, and copies of the target.

Only this module changes foreign objects.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

from _megatron_rl_patches_startup import finder

from ..errors import PatchError
from .call import Call
from .judge import SiteStatus, judge_site, status_of, without_source
from .patch import Site
from .sources import PROGRAM, Environment
from .target_source import layers, resolve
from .third_party import third_party
from .wrapper import SwitchableWrapper

#: Old and new functions, one after the other: the new one of a pair may be the old one of a later pair.
Moves = list[tuple[Any, Any]]


@dataclass(eq=False)
class Claim:
    """What a call of ``apply()`` asked for, while it may still be undone.

    Attributes:
        required: a site that does not fit is an error.
        options: of each patch whose options this call has set: what they were before, and what they are.
    """

    required: bool
    options: dict[str, tuple[Any, Any]] = field(default_factory=dict)


class Record:
    """One selected site.

    ``status`` is the one place that says what became of the site. It is ``waiting`` until the module is
    imported, then ``applied``, ``not needed`` or a fault, and ``reverted`` when no call claims it any more.
    Other code can overwrite an applied site without notice, so ``is_in_place`` looks at the live object.

    Attributes:
        claims: the calls that have selected the site and not been undone.
        group: patch and framework; all sites of a group take effect, or none.
        owner: the module or class that held the target when it was wrapped.
        wrapper: what is, or was, in place of the target; ``None`` before it is wrapped, and after a revert.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.status = _waiting(site)
        self.claims: set[Claim] = set()
        self.group = (site.patch, site.framework)
        self.owner: Any = None
        self.wrapper: SwitchableWrapper | None = None

    @property
    def is_required(self) -> bool:
        return any(claim.required for claim in self.claims)

    @property
    def is_reverted(self) -> bool:
        return self.status.state == "reverted"

    @property
    def is_imported(self) -> bool:
        """Whether the module has been imported completely.

        The program never has. It is ready when it has defined the target, until it ends and forgets its file.
        """
        if self.site.module == PROGRAM:
            return self._live()[0] is not None and Environment().has_package(PROGRAM)
        return finder.is_imported(self.site.module)

    @property
    def is_in_place(self) -> bool:
        return self.wrapper is not None and any(layer is self.wrapper for layer in layers(self._live()[1]))

    @property
    def is_open(self) -> bool:
        """Whether the patch may have to be put in place here: it is not in place, reverted or unneeded."""
        return self.status.state not in ("reverted", "not needed") and not self.is_in_place

    def current(self) -> SiteStatus:
        """Return the status, read from the live object."""
        site, status, environment = self.site, self.status, Environment()
        if self.wrapper is not None and not self.is_in_place:
            return status_of(site, "lost", self._reason_lost(), status.fingerprint)
        if status.state == "applied" and site.detail is not None:
            try:
                with third_party("its function `detail`"):
                    return replace(status, detail=site.detail())
            except PatchError as error:
                return replace(status, detail=str(error))
        if status.state != "waiting" or site.module in sys.modules or environment.file_of(site.module):
            return status
        if environment.has_package(site.framework):
            return without_source(site)
        return status_of(site, "absent", f"{site.framework} is not installed")

    def judge(self, is_imported: bool) -> SiteStatus:
        """Judge the site anew, unless it is in place."""
        if self.is_in_place:
            return self.status
        status = judge_site(self.site, Environment(), sys.modules[self.site.module] if is_imported else None)
        if status.state == "conflict" and self.wrapper is not None and self._live()[0] is self.owner:
            # The code that overwrote it may call it. So it stays as it is, and is reported as lost.
            return status_of(self.site, "applied", "in place", status.fingerprint)
        return status

    def settle(self, status: SiteStatus) -> None:
        """Take the status; a site that fits, and is not wrapped, waits for its module."""
        fits = status.state == "fits"
        self.status = _waiting(self.site, status.fingerprint) if fits else status

    def wrap(self, adapter: Callable[[Call], Any]) -> Moves:
        """Put a wrapper in place that calls the adapter; return what moved."""
        self.owner, name = resolve(sys.modules[self.site.module], self.site.qualname)
        current = vars(self.owner)[name]
        # An earlier revert may have switched a wrapper off and left it under another one.
        path = (self.site.patch, self.site.module, self.site.qualname)
        own = (w for w in layers(current) if type(w) is SwitchableWrapper and w.path == path and not w.is_on)
        self.wrapper = next(own, None) or SwitchableWrapper(current, adapter, self.site, self.owner)
        if not self.is_in_place:
            setattr(self.owner, name, self.wrapper)
        self.wrapper.switch(True)
        return [(self.wrapper.__wrapped__, self.wrapper)]

    def unwrap(self) -> Moves:
        """Put the original back; return what moved."""
        wrapper = self.wrapper
        if wrapper is None:
            return []
        # The wrapper is switched off first, so that it is inert in calls of other threads and in copies that
        # cannot be reached.
        wrapper.switch(False)
        original = wrapper.__wrapped__
        # The original may be the wrapper of a patch that has been reverted before this one.
        while type(original) is SwitchableWrapper and not original.is_on:
            original = original.__wrapped__
        name = self.site.qualname.rpartition(".")[2]
        if vars(self.owner).get(name) is wrapper:
            setattr(self.owner, name, original)
        self.wrapper = None
        return [(wrapper, original)]

    def _live(self) -> tuple[Any, Any]:
        """Return the owner of the target and the target, as they are now; after a reload both are others."""
        try:
            owner, name = resolve(sys.modules[self.site.module], self.site.qualname)
            return owner, vars(owner)[name]
        except (KeyError, AttributeError):
            return None, None

    def _reason_lost(self) -> str:
        owner, current = self._live()
        if current is None:
            return f"{self.site.target} is gone"
        if owner is not self.owner:
            return f"{self.site.module} was imported anew; call apply() again"
        home = f"{getattr(current, '__module__', '?')}.{getattr(current, '__qualname__', '?')}"
        return f"overwritten by {home}; in force only if that calls what it replaced"


def _waiting(site: Site, fingerprint: str = "") -> SiteStatus:
    event = "definition in the program's file" if site.module == PROGRAM else f"import of {site.module}"
    return status_of(site, "waiting", f"waits for the {event}", fingerprint)


def rebind(moves: Moves, package: str = "") -> None:
    """Have every module that holds an old function under some name hold the new one, found by identity.

    Args:
        moves: what was wrapped and unwrapped.
        package: the only package whose modules are searched; without it all are.
    """
    final: dict[int, Any] = {}
    for old, new in reversed(moves):
        final[id(old)] = final.get(id(new), new)
    if not final:
        return
    for module_name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or (package and module_name.partition(".")[0] != package):
            continue
        for name in [name for name, value in list(vars(module).items()) if id(value) in final]:
            # A module that refuses keeps the old function, like other copies that cannot be reached.
            with suppress(Exception):
                setattr(module, name, final[id(vars(module)[name])])


def copies_out_of_reach(wrapper: SwitchableWrapper) -> int:
    """Return how many references to the original there are, after :func:`rebind`, besides the wrapper's."""
    held_once = SimpleNamespace(__wrapped__=object())
    count = sys.getrefcount(wrapper.__wrapped__) - sys.getrefcount(held_once.__wrapped__)
    # The wrapper's closure holds it, too, and so does a record if it is the wrapper of another patch.
    return count - 1 - (type(wrapper.__wrapped__) is SwitchableWrapper)
