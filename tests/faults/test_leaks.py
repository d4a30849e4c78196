"""Forty failing calls of ``train()`` leave nothing behind; the next trains as if they had not been."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.hooks import RemovableHandle

from megatron_rl_patches import applied
from megatron_rl_patches.testing import TinyModel
from tests.ranks import everywhere, on_ranks
from tests.real.faults import Trainee, same_process_groups
from tests.real.test_interruption import SETTINGS
from tests.references.live_bytes import reachable_bytes

ROUNDS = 4
# Stage and step of each failing call of a round. Not "in step": what a half update gives is not defined.
ROUND = [
    ("before forward", 0),
    ("forward 0", 1),
    ("backward 0", 1),
    ("forward 1", 1),
    ("backward 1", 1),
    ("before step", 1),
    ("after step", 1),
    ("backward 1", 0),
    ("after step", 0),
    ("before step", 0),
]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads and file descriptors in /proc")
@on_ranks(2, timeout=200)
def test_forty_failing_calls() -> None:
    assert ROUNDS * len(ROUND) == 40
    with applied("reentrant-train", settings=SETTINGS):
        trainee = Trainee(TinyModel())
        found = []  # after the first call of every stage, and 20 and 40 calls later
        for done in range(1 + ROUNDS):
            for stage, step in ROUND:
                trainee.fail(stage, step)
            if done % 2 == 0:
                found.append(held(trainee.model))
        trainee.train(2)
        with same_process_groups():
            undisturbed = Trainee(TinyModel())
        undisturbed.train(trainee.done)
    warm, *later = found
    assert warm["hooks"] > 0 and warm["live bytes"] > 0
    assert later == [warm, warm]
    assert trainee.checksums() == undisturbed.checksums()
    assert trainee.losses == undisturbed.losses[-2:]
    first, second = everywhere(trainee.checksums().params)
    assert first == second


# What a failing call could leave behind in a process.
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
