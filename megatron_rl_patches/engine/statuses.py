"""The states of sites: values, and how they are listed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from .patch import Site

#: States in which a patch that was asked for is not in place, and should be.
Fault = Literal["missing", "drifted", "conflict", "failed"]
_FAULTS = get_args(Fault)
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
        return self.state in _FAULTS

    def __str__(self) -> str:
        detail = f"; {self.detail}" if self.detail else ""
        return f"{self.patch}: {self.target}: {self.state}: {self.reason}{detail}"


class Statuses(list[SiteStatus]):
    """States of patched functions, printed as :func:`overview`, with faults and details below."""

    def __str__(self) -> str:
        rows, idle = overview(self)
        lines = ["  ".join(cells).rstrip() for cells in aligned(rows)]
        lines += [idle, *(str(site) for site in self if site.is_fault or site.state == "lost" or site.detail)]
        return "\n".join(filter(None, lines)) or "no patch is selected"

    __repr__ = __str__


def grouped(statuses: Iterable[SiteStatus]) -> dict[str, dict[str, list[SiteStatus]]]:
    """Return the statuses by patch, and of each patch by framework."""
    groups: dict[str, dict[str, list[SiteStatus]]] = {}
    for status in statuses:
        groups.setdefault(status.patch, {}).setdefault(status.framework, []).append(status)
    return groups


def overview(
    statuses: Sequence[SiteStatus], left_out: Container[str] = ()
) -> tuple[list[tuple[str, str, str]], str]:
    """Return a header, a row for each patch and framework that is present, and a line with the other patches.

    A row counts the sites in each state, such as ``3 applied, 1 not needed``; ``left_out`` are not selected.
    """
    present = grouped(status for status in statuses if status.state != "absent")
    rows = [("patch", "framework", "patched functions")] * bool(present)
    for patch, frameworks in present.items():
        for framework, sites in frameworks.items():
            counts = Counter(sorted((site.state for site in sites), key="fits".__ne__))
            states = (f"{n} {'fit' if state == 'fits' and n > 1 else state}" for state, n in counts.items())
            rows.append((patch, framework, ", ".join(states) + " (not selected)" * (patch in left_out)))
    idle = ", ".join(patch for patch in grouped(statuses) if patch not in present)
    return rows, idle and f"without a framework: {idle}"


def aligned(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the rows with every cell as wide as the widest of its column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [[*map(str.ljust, row, widths)] for row in rows]


def status_of(site: Site, state: State, reason: str, fingerprint: str = "") -> SiteStatus:
    """Return the status of a site."""
    return SiteStatus(site.patch, site.framework, site.target, state, reason, fingerprint)
