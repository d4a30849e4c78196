"""A hundred failing calls of ``train()`` leave nothing behind; the next trains as if they had not been."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import pytest

from megatron_rl_patches import applied
from megatron_rl_patches.testing import cpu_backend, spawn_ranks
from tests.real.test_interruption import SETTINGS

ROUNDS = 10
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


@dataclass
class Report:
    """What one rank reports."""

    held: list[dict[str, int]]  # after the first call of every stage, and 50 and 100 calls later
    end: Any
    undisturbed: Any
    last_losses: tuple[list[float], list[float]]


def _fail_again_and_again() -> Report:
    with cpu_backend(), applied("reentrant-train", settings=SETTINGS):
        from tests.faults.resources import held
        from tests.real.faults import Trainee, same_process_groups
        from tests.real.tiny_gpt import Options

        trainee = Trainee(Options())
        found = []
        for done in range(1 + ROUNDS):
            for stage, step in ROUND:
                trainee.fail(stage, step)
            if done % 5 == 0:
                found.append(held(trainee.model))
        trainee.train(2)
        with same_process_groups():
            undisturbed = Trainee(Options())
        undisturbed.train(trainee.done)
        losses = trainee.losses, undisturbed.losses[-2:]
        return Report(found, trainee.checksums(), undisturbed.checksums(), losses)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads and file descriptors in /proc")
def test_a_hundred_failing_calls() -> None:
    assert ROUNDS * len(ROUND) == 100
    first, second = spawn_ranks(_fail_again_and_again, 2, timeout=200)
    for report in (first, second):
        warm, *later = report.held
        assert warm["hooks"] > 0 and warm["live bytes"] > 0
        assert later == [warm, warm]
        assert report.end == report.undisturbed
        assert report.last_losses[0] == report.last_losses[1]
    assert first.end.params == second.end.params
