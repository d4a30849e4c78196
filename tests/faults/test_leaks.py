"""Forty failing calls of ``train()`` leave nothing behind; the next trains as if they had not been."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.hooks import RemovableHandle

from megatron_rl_patches import applied
from megatron_rl_patches.testing import TinyModel
from tests.ranks import everywhere, on_ranks
from tests.real.faults import STAGES, Trainee, same_process_groups
from tests.real.test_interruption import SETTINGS
from tests.references.live_bytes import reachable_bytes

ROUNDS = 4
# Stage and step of each failing call of a round. Not "in step": what a half update gives is not defined.
IN_SECOND_STEP = [stage for stage in STAGES if stage not in ("before forward", "in step")]
ROUND = [("before forward", 0), *((stage, 1) for stage in IN_SECOND_STEP)]
ROUND += [("backward 1", 0), ("after step", 0), ("before step", 0)]


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


def held(model: Sequence[Any]) -> dict[str, int]:
    """Return counts of what a failing call could leave behind in a process, after collecting garbage."""
    counts = {"live bytes": reachable_bytes()}
    things = [type(thing) for thing in gc.get_objects()]
    for kinds in (
        (types.GeneratorType, contextlib._GeneratorContextManager),
        (RemovableHandle,),
        (torch.Tensor,),
        (types.FrameType,),
        (BaseException,),
    ):
        counts[kinds[0].__name__] = sum(issubclass(kind, kinds) for kind in things)
    owners = [vars(thing) for chunk in model for thing in (*chunk.modules(), *chunk.parameters())]
    hooks = [value for owner in owners for name, value in owner.items() if name.endswith("_hooks")]
    counts["hooks"] = sum(len(value) for value in hooks if value)
    groups = [group for chunk in model for group in chunk.bucket_groups]
    counts["grad reduces"] = sum(group.grad_reduce_handle is not None for group in groups)
    counts["param gathers"] = sum(group.param_gather_handle is not None for group in groups)
    counts["Python threads"] = threading.active_count()
    counts["threads"] = len(os.listdir("/proc/self/task"))
    counts["file descriptors"] = len(os.listdir("/proc/self/fd"))
    return counts
