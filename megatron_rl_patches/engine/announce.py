"""Log lines that say which patches are in place and which are not."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import suppress

from ..common.lazy import version_of
from ..common.messages import Message, is_rank_0, log
from .statuses import SiteStatus, grouped

_SKIPPED = Message(
    "skipped {patch}: {functions}: {state}: {reason}",
    "This framework runs its own code there, as without the patch.",
    "Use a release that docs/compatibility.md names, and report this one; to leave the patch out, add "
    "-{patch} to MEGATRON_RL_PATCHES.",
)
_NEVER_IMPORTED = Message(
    "these were never imported by this process, so nothing was patched there: {functions}",
    "This is harmless in a process that does not train.",
    "If this one trains with another function than these, name it in MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS.",
)


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
            targets.setdefault((fault.patch, fault.state, fault.reason), []).append(fault.target)
        for (patch, state, reason), alike in targets.items():
            functions = ", ".join(alike)
            line = _SKIPPED.text(patch=patch, functions=functions, state=state, reason=reason.rstrip("."))
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


def _log_line(level: int, line: str) -> None:
    is_muted = log.disabled or log.level > level  # by the user, as nothing else sets a level of this logger
    if is_muted or not is_rank_0():
        return
    with suppress(Exception):  # a handler that raises; no stderr, or a closed one
        if log.hasHandlers() and log.isEnabledFor(level):
            log.log(level, "%s", line)
        else:
            print(line, file=sys.stderr)
