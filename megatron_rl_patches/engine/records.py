"""What became of a selected site, and which calls of ``apply()`` selected it."""

from __future__ import annotations

import sys
from typing import Any

from _megatron_rl_patches_startup import finder

from .judge import SiteStatus, status_of
from .patch import Site
from .sources import PROGRAM, Environment
from .target_source import is_defined
from .wrapper import PatchedAttribute


class Claim:
    """One call of ``apply()`` that may still be undone.

    Attributes:
        options: of each patch whose options this call has set: what they were before, and what they are.
    """

    def __init__(self) -> None:
        self.options: dict[str, tuple[Any, Any]] = {}


class Record:
    """One selected site.

    ``status`` is the one place that says what became of the site. It is ``waiting`` until the module is
    imported, then ``applied``, ``not needed`` or a fault, and ``reverted`` when no call claims it any more.
    Other code can overwrite an applied site without notice, so ``is_in_place`` looks at the live object.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.status = waiting(site)
        #: Claim -> whether this call requires the site; ``None`` stands for all permanent calls.
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
        return finder.is_imported(self.site.module)

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
