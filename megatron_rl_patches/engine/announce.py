"""Tells the log what is in place and what is not: silence is what users of patches complain about most."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from .. import __version__
from .report import SiteStatus, summary

_log = logging.getLogger("megatron_rl_patches")
_warned: set[SiteStatus] = set()
done = False


def once(statuses: Sequence[SiteStatus]) -> None:
    """The one summary line of this process, on rank 0."""
    global done
    if not done:
        done = True
        _say(logging.INFO, summary(statuses, __version__))
        warn([status for status in statuses if status.is_fault and status.host in sys.modules])


def warn(faults: Sequence[SiteStatus]) -> None:
    """One warning for each skipped site, however often it is judged; a common one for a common reason."""
    alike: dict[tuple[str, str, str], list[SiteStatus]] = {}
    for fault in dict.fromkeys(fault for fault in faults if fault not in _warned):
        _warned.add(fault)
        alike.setdefault((fault.patch, fault.state, fault.reason), []).append(fault)
    for skipped in alike.values():
        together = replace(skipped[0], target=", ".join(fault.target for fault in skipped))
        _say(logging.WARNING, f"megatron_rl_patches: skipped {together}")


def at_exit(statuses: Sequence[SiteStatus]) -> None:
    """A patched function was never called, or a host was used of which a patched module never was."""
    used = [status for status in statuses if status.host in sys.modules]
    if any(status.state not in ("waiting", "reverted") and not status.is_fault for status in used):
        once(used)
    warn([status for status in used if status.is_fault])
    idle = [status.target for status in used if status.state == "waiting"]
    if idle:
        _say(
            logging.WARNING,
            "megatron_rl_patches: these were never imported by this process, so nothing was patched there: "
            + ", ".join(idle),
        )


def _say(level: int, line: str) -> None:
    if _rank() != 0:
        return
    if _log.hasHandlers() and _log.isEnabledFor(level):
        _log.log(level, line)
    else:
        with suppress(Exception):  # no stderr, or a closed one: nobody to tell
            print(line, file=sys.stderr)


def _rank() -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    try:
        return max(0, int(os.environ.get("RANK", "0")))
    except ValueError:
        return 0
