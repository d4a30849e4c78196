"""The states of sites: values, how they are listed, and what is logged of them."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, get_args

from ..common.lazy import version_of
from ..common.messages import Message, is_rank_0, log
from .patch import Site

_SKIPPED = Message(
    "skipped {patch}: {functions}: {state}: {reason}",
    "This framework runs its own code there, as without the patch.",
    "Use a release that docs/compatibility.md names, and report this one; to leave the patch out, add "
    "-{patch} to MEGATRON_RL_PATCHES.",
)
_NEVER_IMPORTED = Message(
    "this process has never imported these functions, so they are not patched: {functions}",
    "This is harmless in a process that does not train.",
    "If it trains with a function of another name, write that into MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS.",
)

#: States in which a patch that was asked for is not in place, and should be.
Fault = Literal["missing", "drifted", "conflict", "failed"]
State = Literal[Fault, "fits", "absent", "applied", "waiting", "not needed", "lost", "reverted"]

#: What tables of commands and pages say of a patch in a framework: these, or a state of its functions.
PATCHED, NOT_NEEDED, NOT_CHECKED, ABSENT = "patched", "not needed", "not checked", "absent"


@dataclass(frozen=True)
class SiteStatus:
    """The state of one function that a patch is for, and why it is in that state.

    ``docs/how-it-works.md`` explains the states. By its source alone it is ``fits``, ``absent``, ``not
    needed`` or a fault. ``detail`` says what an applied patch has done in this process. A function that fits
    by itself, and has the state of another one that does not, names it in ``because_of``.
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

    @property
    def word(self) -> str:
        """What tables say of the state: ``patched`` for ``fits`` and ``applied``, the state for others."""
        return PATCHED if self.state in ("fits", "applied") else self.state

    def __str__(self) -> str:
        detail = f"; {self.detail}" if self.detail else ""
        return f"{self.patch}: {self.target}: {self.word}: {self.reason}{detail}"


def status_of(site: Site, state: State, reason: str, fingerprint: str = "") -> SiteStatus:
    return SiteStatus(site.patch, site.framework, site.target, state, reason, fingerprint)


class Statuses(list[SiteStatus]):
    """States of patched functions, printed as :func:`overview`, with faults and details below."""

    def __str__(self) -> str:
        lines = ["  ".join(cells).rstrip() for cells in aligned(overview(self))]
        lines += [str(site) for site in self if site.is_fault or site.state == "lost" or site.detail]
        return "\n".join(lines) if self else "no patch is selected"

    __repr__ = __str__


def grouped(statuses: Iterable[SiteStatus]) -> dict[str, dict[str, list[SiteStatus]]]:
    """Return the statuses by patch, and of each patch by framework."""
    groups: dict[str, dict[str, list[SiteStatus]]] = {}
    for status in statuses:
        groups.setdefault(status.patch, {}).setdefault(status.framework, []).append(status)
    return groups


def overview(statuses: Sequence[SiteStatus], selects: Mapping[str, str] = {}) -> list[tuple[str, str, str]]:
    """Return a header, a row for each patch and framework that is present, and one for each other patch.

    A row counts functions, such as ``3 patched, 1 not needed``. ``selects`` is what would select others.
    """
    present = grouped(status for status in statuses if status.state != ABSENT)
    rows = [("patch", "framework", "functions")]
    for patch, frameworks in present.items():
        for framework, sites in frameworks.items():
            words = Counter(sorted((site.word for site in sites), key=PATCHED.__ne__))
            counts = ", ".join(f"{n} {word}" for word, n in words.items())
            condition = f" (if selected by {selects[patch]})" if patch in selects else ""
            rows.append((patch, framework, counts + condition))
    return rows + [(patch, "-", ABSENT) for patch in grouped(statuses) if patch not in present]


def aligned(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the rows with every cell as wide as the widest of its column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [[*map(str.ljust, row, widths)] for row in rows]


def summary(statuses: Sequence[SiteStatus], version: str) -> str:
    """Return one line that names what is in place, skipped or overwritten, and counts the other patches."""
    applied = [status for status in statuses if status.state == "applied"]
    packages = dict.fromkeys(status.framework.partition(".")[0] for status in applied)
    in_place, skipped = grouped(applied), grouped(status for status in statuses if status.is_fault)
    lost = grouped(status for status in statuses if status.state == "lost")
    line = f" in {', '.join(packages)}: {', '.join(in_place)}" if in_place else ": nothing in place"
    line += f"; skipped: {', '.join(skipped)}" if skipped else ""
    line += f"; overwritten: {', '.join(lost)}" if lost else ""
    if idle := len(grouped(statuses).keys() - {*in_place, *skipped, *lost}):
        line += f"; idle: {idle}"
    return f"megatron_rl_patches {version}{line}"


class Announcer:
    """Says each thing once in a process, and on rank 0 only."""

    def __init__(self) -> None:
        self.done = False
        self._warned: set[SiteStatus] = set()

    def once(self, statuses: Sequence[SiteStatus]) -> None:
        """Log the one summary line of this process."""
        if not self.done:
            self.done = True
            _log_line(logging.INFO, summary(statuses, version_of("megatron-rl-patches") or "unknown"))
            self.warn([status for status in statuses if status.is_fault and status.framework in sys.modules])

    def warn(self, faults: Sequence[SiteStatus]) -> None:
        """Log one warning for every site that is skipped; sites with a common reason share it."""
        targets: dict[tuple[str, str, str], list[str]] = {}
        for fault in dict.fromkeys(fault for fault in faults if fault not in self._warned):
            self._warned.add(fault)
            targets.setdefault((fault.patch, fault.state, fault.reason.rstrip(".")), []).append(fault.target)
        for (patch, state, reason), alike in targets.items():
            line = _SKIPPED.text(patch=patch, functions=", ".join(alike), state=state, reason=reason)
            _log_line(logging.WARNING, line)

    def at_exit(self, statuses: Sequence[SiteStatus]) -> None:
        """Log what was not logged before: the summary if nothing patched ran, and modules never imported."""
        used = [status for status in statuses if status.framework in sys.modules]
        faults = [status for status in used if status.is_fault]
        states = {status.state for status in used}
        if "applied" in states or ("not needed" in states and not faults):
            self.once(used)
        self.warn(faults)
        if idle := [status.target for status in used if status.state == "waiting"]:
            _log_line(logging.WARNING, _NEVER_IMPORTED.text(functions=", ".join(idle)))


def _log_line(level: int, line: str) -> None:
    is_muted = log.disabled or log.level > level  # by the user, as nothing else sets a level of this logger
    if is_muted or not is_rank_0():
        return
    with suppress(Exception):  # a handler that raises; no stderr, or a closed one
        if log.hasHandlers() and log.isEnabledFor(level):
            log.log(level, "%s", line)
        else:
            print(line, file=sys.stderr)
