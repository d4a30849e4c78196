"""``train()`` that raised at any stage of a step, with tensor and pipeline parallelism, can be called again.

With data parallelism: see ``tests/real/test_interruption.py``.
"""

from __future__ import annotations

from itertools import product

import pytest

from megatron_rl_patches import applied
from megatron_rl_patches.testing import cpu_backend, spawn_ranks
from tests.real.outcomes import Outcome
from tests.real.stages import PLACES, STAGES
from tests.real.test_interruption import OVERLAPS, SETTINGS

TENSOR_PARALLEL = [(stage, stage) for stage in STAGES]
# Stages of the first and the second pipeline rank where neither waits for the other, nor is a message of one
# on its way that the other has not received: a retry would take it for its own.
PIPELINE_PARALLEL = [
    ("before forward", "before forward"),
    ("forward 0", "before forward"),
    ("forward 1", "forward 0"),
    ("forward 1", "backward 0"),
    ("backward 0", "forward 1"),
    ("backward 0", "backward 1"),
    ("backward 1", "before step"),
    ("before step", "before step"),
    ("in step", "in step"),
    ("after step", "after step"),
]
Where = tuple[str, str, tuple[str, str]]


def _campaign(sizes: dict[str, int], stages: list[tuple[str, str]]) -> dict[Where, tuple[Outcome, Outcome]]:
    with cpu_backend(), applied("reentrant-train", settings=SETTINGS):
        import torch.distributed as dist

        from tests.real.faults import interrupt, raise_injected, run, same_process_groups
        from tests.real.tiny_gpt import Options, Parallelism

        # Ctrl-C passes `except Exception`, which the other does not.
        strikes = {"first batch": raise_injected, "later step": interrupt}
        outcomes = {}
        for overlap, flags in OVERLAPS.items():
            options = Options(parallelism=Parallelism(**sizes), **flags)
            undisturbed = run(options, None, (0, 0))
            with same_process_groups():
                for stages_of_ranks, place in product(stages, strikes):
                    stage = stages_of_ranks[dist.get_rank()]
                    outcome = run(options, stage, PLACES[place], strikes[place])
                    outcomes[overlap, place, stages_of_ranks] = undisturbed, outcome
        return outcomes


def _compare(ranks: list[dict[Where, tuple[Outcome, Outcome]]]) -> None:
    first, second = ranks
    assert first.keys() == second.keys()
    for where, (undisturbed, outcome) in [*first.items(), *second.items()]:
        if "in step" in where[2]:
            continue
        assert outcome.losses[-1] == undisturbed.losses[-1], where
        assert outcome.end == undisturbed.end, where


@pytest.mark.slow
def test_tensor_parallel_ranks() -> None:
    ranks = spawn_ranks(_campaign, 2, {"tp": 2}, TENSOR_PARALLEL, timeout=240)
    _compare(ranks)
    for where in ranks[0]:
        one, other = (rank[where][1] for rank in ranks)
        assert one.at_reentry.replicated == other.at_reentry.replicated, where
        assert one.end.replicated == other.end.replicated, where
        assert one.end.params != other.end.params


@pytest.mark.slow
def test_pipeline_parallel_ranks() -> None:
    _compare(spawn_ranks(_campaign, 2, {"pp": 2}, PIPELINE_PARALLEL, timeout=240))
