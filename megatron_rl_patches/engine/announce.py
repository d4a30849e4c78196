"""Tells the log what is in place and what is not: silence is what users of patches complain about most."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

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
        warn([status for status in statuses if status.is_fault])


def warn(faults: Sequence[SiteStatus]) -> None:
    """One warning for each skipped site, however often it is judged."""
    for fault in set(faults) - _warned:
        _warned.add(fault)
        _say(logging.WARNING, f"megatron_rl_patches: skipped {fault}")


def at_exit(statuses: Sequence[SiteStatus]) -> None:
    """A patched function was never called, or a host was used of which a patched module never was."""
    if any(status.state not in ("waiting", "reverted") for status in statuses):
        once(statuses)
    idle = [s.target for s in statuses if s.state == "waiting" and s.host in sys.modules]
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
    value = os.environ.get("RANK", "0")
    return int(value) if value.isdecimal() else 0
