"""A hundred failing calls of ``train()`` leave nothing behind; the next trains as if they had not been."""

from __future__ import annotations

import sys

import pytest

from megatron_rl_patches import applied
from tests.faults.resources import held
from tests.ranks import everywhere, on_ranks
from tests.real.faults import Trainee, same_process_groups
from tests.real.test_interruption import SETTINGS
from tests.real.tiny_gpt import Options

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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads and file descriptors in /proc")
@on_ranks(2, timeout=200)
def test_a_hundred_failing_calls() -> None:
    assert ROUNDS * len(ROUND) == 100
    with applied("reentrant-train", settings=SETTINGS):
        trainee = Trainee(Options())
        found = []  # after the first call of every stage, and 50 and 100 calls later
        for done in range(1 + ROUNDS):
            for stage, step in ROUND:
                trainee.fail(stage, step)
            if done % 5 == 0:
                found.append(held(trainee.model))
        trainee.train(2)
        with same_process_groups():
            undisturbed = Trainee(Options())
        undisturbed.train(trainee.done)
    warm, *later = found
    assert warm["hooks"] > 0 and warm["live bytes"] > 0
    assert later == [warm, warm]
    assert trainee.checksums() == undisturbed.checksums()
    assert trainee.losses == undisturbed.losses[-2:]
    first, second = everywhere(trainee.checksums().params)
    assert first == second
