"""In the shape of miles' parallel state: groups of its own."""

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


_states: list[ParallelState] = []


def set_parallel_state(state: ParallelState) -> None:
    _states[:] = [state]


def get_parallel_state() -> ParallelState:
    return _states[0]
