"""The state of a site, and the states of all as one line. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .judge import FAULTS, State


@dataclass(frozen=True)
class SiteStatus:
    """State of one site at the moment of asking.

    From live objects it is one of those in ``docs/how-it-works.md``. From source alone it is ``fits``,
    ``absent`` (no such host there), ``not needed`` or a fault.
    """

    patch: str
    host: str
    target: str
    state: State
    reason: str
    fingerprint: str = ""

    @property
    def is_fault(self) -> bool:
        return self.state in FAULTS

    def __str__(self) -> str:
        return f"{self.patch}: {self.target}: {self.state}: {self.reason}"


def summary(statuses: Sequence[SiteStatus], version: str) -> str:
    """One line for a log: what is in place, and what is not and why. Absent hosts are not mentioned."""
    parts = []
    for patch in dict.fromkeys(status.patch for status in statuses):
        counts = Counter(
            (status.host, status.state)
            for status in statuses
            if status.patch == patch and status.state != "waiting"
        )
        told = ", ".join(f"{host}: {count} {state}" for (host, state), count in counts.items())
        parts.append(f"{patch} ({told or 'waiting for a host'})")
    return f"megatron_rl_patches {version}: {'; '.join(parts) or 'nothing selected'}"
