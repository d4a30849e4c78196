"""Tells the log what is in place and what is not: silence is what users of patches complain about most."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

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


def warn(faults: Sequence[SiteStatus]) -> None:
    """One warning for each skipped site, however often it is judged."""
    for fault in set(faults) - _warned:
        _warned.add(fault)
        _say(logging.WARNING, f"megatron_rl_patches: skipped {fault}")


def never_imported(statuses: Sequence[SiteStatus]) -> None:
    """At exit: a host was used, but a module that should have been patched in it never was."""
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
    if _log.hasHandlers():
        _log.log(level, line)
    elif sys.stderr is not None:
        print(line, file=sys.stderr)


def _rank() -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    value = os.environ.get("RANK", "0")
    return int(value) if value.isdecimal() else 0
