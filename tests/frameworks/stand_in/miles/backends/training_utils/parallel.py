"""In the shape of miles: groups that the trainer sets, whatever trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class GroupInfo:
    rank: int
    size: int
    group: Any


@dataclass
class ParallelState:
    tp: GroupInfo
    cp: GroupInfo


_parallel_state: ParallelState | None = None


def set_parallel_state(state: ParallelState) -> None:
    global _parallel_state
    _parallel_state = state


def get_parallel_state() -> ParallelState:
    assert _parallel_state is not None
    return _parallel_state
