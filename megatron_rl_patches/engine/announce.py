"""Log lines that say which patches are in place and which are not."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata

from ..common.ranks import is_rank_0
from .statuses import SiteStatus, counted, grouped

_log = logging.getLogger("megatron_rl_patches")


class Announcer:
    """Says each thing once in a process, and on rank 0 only."""

    def __init__(self) -> None:
        self.done = False
        self._warned: set[SiteStatus] = set()

    def once(self, statuses: Sequence[SiteStatus]) -> None:
        """Log the one summary line of this process."""
        if not self.done:
            self.done = True
            _log_line(logging.INFO, summary(statuses, _version()))
            self.warn([status for status in statuses if status.is_fault and status.framework in sys.modules])

    def warn(self, faults: Sequence[SiteStatus]) -> None:
        """Log one warning for every site that is skipped; sites with a common reason share it."""
        targets: dict[tuple[str, str, str], list[str]] = {}
        for fault in dict.fromkeys(fault for fault in faults if fault not in self._warned):
            self._warned.add(fault)
            targets.setdefault((fault.patch, fault.state, fault.reason), []).append(fault.target)
        for (patch, state, reason), alike in targets.items():
            line = f"megatron_rl_patches: skipped {patch}: {', '.join(alike)}: {state}: {reason}"
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
            line = "these were never imported by this process, so nothing was patched there"
            _log_line(logging.WARNING, f"megatron_rl_patches: {line}: {', '.join(idle)}")


def summary(statuses: Sequence[SiteStatus], version: str) -> str:
    """Return one line about what is in place and what is not. Absent frameworks are not mentioned."""
    parts = []
    judged = grouped(status for status in statuses if status.state not in ("waiting", "absent"))
    for patch in grouped(statuses):
        states = ", ".join(f"{framework}: {counted(own)}" for framework, own in judged.get(patch, {}).items())
        parts.append(f"{patch} ({states or 'waiting for a framework'})")
    return f"megatron_rl_patches {version}: {'; '.join(parts) or 'nothing selected'}"


def _version() -> str:
    try:
        return metadata.version("megatron-rl-patches")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _log_line(level: int, line: str) -> None:
    is_muted = _log.disabled or _log.level > level  # by the user, as nothing else sets a level of this logger
    if is_muted or not is_rank_0():
        return
    with suppress(Exception):  # a handler that raises; no stderr, or a closed one
        if _log.hasHandlers() and _log.isEnabledFor(level):
            _log.log(level, line)
        else:
            print(line, file=sys.stderr)
