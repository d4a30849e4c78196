"""Counts of everything that a failing call could leave behind in a process."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from tests.unit.losses.live_bytes import reachable_bytes

_KINDS: dict[str, tuple[type, ...]] = {
    "generators": (types.GeneratorType, contextlib._GeneratorContextManager),
    "handles of hooks": (RemovableHandle,),
    "tensors": (torch.Tensor,),
    "frames": (types.FrameType,),
    "exceptions": (BaseException,),
}


def held(model: Sequence[Any]) -> dict[str, int]:
    """Return counts by name, after collecting garbage."""
    counts = {"live bytes": reachable_bytes()}
    things = [type(thing) for thing in gc.get_objects()]
    for name, kinds in _KINDS.items():
        counts[name] = sum(issubclass(kind, kinds) for kind in things)
    counts["hooks"] = sum(map(len, _hooks(model)))
    counts["collectives"] = sum(_collectives(model))
    counts["Python threads"] = threading.active_count()
    counts["threads"] = len(os.listdir("/proc/self/task"))
    counts["file descriptors"] = len(os.listdir("/proc/self/fd"))
    return counts


def _hooks(model: Sequence[Any]) -> Iterator[Any]:
    owners = [thing for chunk in model for thing in (*chunk.modules(), *chunk.parameters())]
    for owner in owners:
        yield from (value for name, value in vars(owner).items() if name.endswith("_hooks") and value)


def _collectives(model: Sequence[Any]) -> Iterator[int]:
    for chunk in model:
        for group in chunk.bucket_groups:
            yield (group.grad_reduce_handle is not None) + (group.param_gather_handle is not None)
