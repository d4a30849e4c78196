"""The states of sites: values, and how they are listed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from .patch import Site

#: States in which a patch that was asked for is not in place, and should be.
Fault = Literal["missing", "drifted", "conflict", "failed"]
State = Literal[Fault, "fits", "absent", "applied", "waiting", "not needed", "lost", "reverted"]


@dataclass(frozen=True)
class SiteStatus:
    """The state of one function that a patch is for, and why it is in that state.

    ``docs/how-it-works.md`` lists the states in a running process. By its source alone it is ``fits``
    (the patch has work to do, and can), ``absent`` (there is no such framework), ``not needed`` or a fault.
    ``detail`` says what an applied patch has done in this process, such as steps that were skipped. A
    function that fits by itself, and has the state of another one that does not, names it in ``because_of``.
    """

    patch: str
    framework: str
    target: str
    state: State
    reason: str
    fingerprint: str = ""
    detail: str = ""
    because_of: str = ""

    @property
    def is_fault(self) -> bool:
        return self.state in get_args(Fault)

    def __str__(self) -> str:
        detail = f"; {self.detail}" if self.detail else ""
        return f"{self.patch}: {self.target}: {self.state}: {self.reason}{detail}"


class Statuses(list[SiteStatus]):
    """States of patched functions, printed as a table of patches and frameworks, with faults and details.

    Frameworks that are not there have no column; the list has their functions all the same.
    """

    def __str__(self) -> str:
        present = [status for status in self if status.state != "absent"]
        by_patch = grouped(present)
        frameworks = list(dict.fromkeys(status.framework for status in present))
        rows = [("patch", *frameworks)]
        for patch, sites in by_patch.items():
            rows.append((patch, *(counted(sites.get(framework, ())) for framework in frameworks)))
        lines = [plain_table(rows)] if present else []
        if idle := [patch for patch in grouped(self) if patch not in by_patch]:
            lines.append(f"no framework for these is here: {', '.join(idle)}")
        lines += [str(s) for s in present if s.is_fault or s.state == "lost" or s.detail]
        return "\n".join(lines) or "no patch is selected"

    __repr__ = __str__


def plain_table(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows in aligned columns, a line each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (map(str.ljust, row, widths) for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


def grouped(statuses: Iterable[SiteStatus]) -> dict[str, dict[str, list[SiteStatus]]]:
    """Return the statuses by patch, and of each patch by framework."""
    groups: dict[str, dict[str, list[SiteStatus]]] = {}
    for status in statuses:
        groups.setdefault(status.patch, {}).setdefault(status.framework, []).append(status)
    return groups


def counted(statuses: Iterable[SiteStatus]) -> str:
    """Return how many sites are in which state, such as ``3 applied, 1 not needed``."""
    counts = Counter(status.state for status in statuses)
    return ", ".join(
        f"{count} {'fit' if state == 'fits' and count > 1 else state}" for state, count in counts.items()
    )


def status_of(site: Site, state: State, reason: str, fingerprint: str = "") -> SiteStatus:
    """Return the status of a site."""
    return SiteStatus(site.patch, site.framework, site.target, state, reason, fingerprint)
