"""What became of a selected site, which calls of ``apply()`` selected it, and with which options.

A :class:`Claim` stands for a call that may still be undone on its own, ``None`` for all permanent calls.
"""

from __future__ import annotations

import sys
from typing import Any

from .imports import is_imported
from .judge import SiteStatus, status_of
from .sources import PROGRAM, Environment
from .spec import Site
from .target_source import is_defined
from .wrapper import PatchedAttribute


class Claim:
    """One call of ``apply()``."""


class Record:
    """One selected site.

    ``status`` is the one place that says what became of the site. It is ``waiting`` until the module is
    imported, then ``applied``, ``not needed`` or a fault, and ``reverted`` when no call claims it any more.
    Other code can overwrite an applied site without notice, so ``is_in_place`` looks at the live object.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.status = waiting(site)
        #: Claim -> whether this call requires the site.
        self.claims: dict[Claim | None, bool] = {}
        self.attribute: PatchedAttribute | None = None
        #: Patch and framework: all sites of a group take effect, or none.
        self.group = (site.patch, site.framework)

    @property
    def is_required(self) -> bool:
        return any(self.claims.values())

    def keep(self, claim: Claim) -> None:
        """Make a call permanent."""
        if claim in self.claims:
            self.claims[None] = self.claims.pop(claim) or self.claims.get(None, False)

    def is_imported(self) -> bool:
        """Return whether the module has been imported completely.

        The program never has. It is ready when it has defined the target, until it ends and forgets its file.
        """
        if self.site.module == PROGRAM:
            defined = is_defined(sys.modules[PROGRAM], self.site.qualname)
            return defined and Environment().has_package(PROGRAM)
        return is_imported(self.site.module)

    @property
    def is_reverted(self) -> bool:
        return self.status.state == "reverted"

    @property
    def is_in_place(self) -> bool:
        return self.attribute is not None and self.attribute.is_in_place()

    @property
    def is_open(self) -> bool:
        """Whether the patch may have to be put in place here: it is not in place, reverted or unneeded."""
        return self.status.state not in ("reverted", "not needed") and not self.is_in_place


def waiting(site: Site, fingerprint: str = "") -> SiteStatus:
    event = "definition in the program's file" if site.module == PROGRAM else f"import of {site.module}"
    return status_of(site, "waiting", f"waits for the {event}", fingerprint)


class OptionsInForce:
    """The options that each patch was last applied with, of the calls that have not been undone."""

    def __init__(self) -> None:
        #: Name of a patch -> its options; read by adapters at every call, without a lock.
        self.by_patch: dict[str, Any] = {}
        # For each patch the options of the calls, those in force last.
        self._stacks: dict[str, dict[Claim | None, Any]] = {}

    def set(self, patch: str, claim: Claim, options: Any, in_force: bool) -> None:
        """Record the options of a call: in force at once, or only when those of earlier calls are undone."""
        stack = self._stacks.get(patch, {})
        self._stacks[patch] = {**stack, claim: options} if in_force else {claim: options, **stack}
        self._update(patch)

    def keep(self, claim: Claim) -> None:
        """Make a call permanent; of the permanent calls, the options of the last one count."""
        for patch, stack in self._stacks.items():
            merged: dict[Claim | None, Any] = {}
            for call, options in stack.items():
                key = None if call is claim else call
                merged.pop(key, None)
                merged[key] = options
            self._stacks[patch] = merged

    def release(self, claim: Claim) -> None:
        """Forget a call: the options of the one before it are in force again."""
        for patch, stack in self._stacks.items():
            stack.pop(claim, None)
            self._update(patch)

    def clear(self, patch: str) -> None:
        """Forget all calls. ``by_patch`` keeps its entry for adapters that are running."""
        self._stacks.pop(patch, None)

    def _update(self, patch: str) -> None:
        if stack := self._stacks[patch]:
            self.by_patch[patch] = [*stack.values()][-1]
