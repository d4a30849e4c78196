"""A ``train()`` that raised, at every stage of a step, can be called again, on every layout.

What else can go wrong in a run is in ``tests/faults``.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from megatron_rl_patches import Settings, applied
from megatron_rl_patches.testing import cpu_backend, spawn_ranks
from tests.real.stages import PLACES, STAGES

SETTINGS = Settings(train_functions=("tests.real.tiny_gpt:train",))
OVERLAPS = {
    "no overlap": {"overlap_grad_reduce": False, "overlap_param_gather": False},
    "grad reduce": {"overlap_grad_reduce": True, "overlap_param_gather": False},
    "both": {"overlap_grad_reduce": True, "overlap_param_gather": True},
}


def _on_cpu(function: Any, *args: Any) -> Any:
    with cpu_backend():
        return function(*args)


# --- all ranks

# Stages of the first and the second rank. Of a pipeline, those where neither waits for the other, nor is a
# message of one on its way that the other has not received: a retry would take it for its own.
SAME = [(stage, stage) for stage in STAGES]
OF_A_PIPELINE = [
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
# Sizes and stages, and which of the parameters both ranks have.
LAYOUTS: dict[str, tuple[dict[str, int], list[tuple[str, str]], str | None]] = {
    "DP 2": ({}, SAME, "params"),
    "TP 2": ({"tp": 2}, SAME, "replicated"),
    "PP 2": ({"pp": 2}, OF_A_PIPELINE, None),
}


def _campaign(
    flags: dict[str, Any], sizes: dict[str, int], stages: list[tuple[str, str]]
) -> dict[tuple[tuple[str, str], str], tuple[Any, Any]]:
    import torch.distributed as dist

    from tests.real.faults import interrupt, raise_injected, run, same_process_groups
    from tests.real.tiny_gpt import Options, Parallelism

    options = Options(parallelism=Parallelism(**sizes), **flags)
    with applied("reentrant-train", settings=SETTINGS):
        undisturbed = run(options, None, (0, 0))
        outcomes = {}
        with same_process_groups():
            for of_ranks, place in product(stages, PLACES):
                # Ctrl-C passes `except Exception`, which the other does not.
                strike = interrupt if place == "later step" else raise_injected
                outcome = run(options, of_ranks[dist.get_rank()], PLACES[place], strike)
                outcomes[of_ranks, place] = undisturbed, outcome
        return outcomes


@pytest.mark.parametrize(
    ("layout", "overlap", "only"),
    [
        ("DP 2", "both", [("backward 1", "backward 1")]),
        *(pytest.param(*case, None, marks=pytest.mark.slow) for case in product(LAYOUTS, OVERLAPS)),
    ],
)
def test_stages_on_all_ranks(layout: str, overlap: str, only: list[tuple[str, str]] | None) -> None:
    sizes, stages, shared = LAYOUTS[layout]
    first, second = spawn_ranks(_on_cpu, 2, _campaign, OVERLAPS[overlap], sizes, only or stages, timeout=240)
    assert first.keys() == second.keys()
    for where, (undisturbed, outcome) in first.items():
        undisturbed_2, outcome_2 = second[where]
        if shared is not None:
            for name in ("at_reentry", "end"):
                one, other = (getattr(getattr(found, name), shared) for found in (outcome, outcome_2))
                assert one == other, f"{where}: parameters differ across ranks: {name}"
        if "in step" in where[0]:
            continue
        for found, expected in ((outcome, undisturbed), (outcome_2, undisturbed_2)):
            assert found.losses[-1] == expected.losses[-1], where
            assert found.end == expected.end, where


# --- one rank only: its peers are in collectives, which its retry has to meet

LINE_UP = [("before forward", 0), ("before forward", 1), ("forward 1", 1), ("after step", 1)]


def _one_rank(flags: dict[str, Any], stage: str, failing_step: int, failing_rank: int | None) -> Any:
    import torch.distributed as dist

    from tests.real.faults import Trainee
    from tests.real.tiny_gpt import Options

    trainee = Trainee(Options(**flags))
    trainee.train(1)
    if dist.get_rank() == failing_rank:
        trainee.fail(stage, failing_step)
        if trainee.done < 3:
            trainee.train(3 - trainee.done)
    else:
        trainee.train(2)
    trainee.train(1)
    return trainee.checksums()


def _one_rank_campaign(flags: dict[str, Any]) -> dict[Any, tuple[Any, Any]]:
    with applied("reentrant-train", settings=SETTINGS):
        undisturbed = _one_rank(flags, "", 0, None)
        return {(stage, step): (undisturbed, _one_rank(flags, stage, step, 1)) for stage, step in LINE_UP}


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["grad reduce", "no overlap"])
def test_one_rank_alone_may_retry_while_no_collective_is_under_way(overlap: str) -> None:
    for outcomes in spawn_ranks(_on_cpu, 2, _one_rank_campaign, OVERLAPS[overlap], timeout=120):
        for where, (undisturbed, outcome) in outcomes.items():
            assert outcome == undisturbed, where


def _raises_on_one_rank_at_the_end() -> tuple[Any, Any]:
    import torch.distributed as dist

    from megatron_rl_patches.reentry import reentrant_train
    from tests.real.faults import Injected, Trainee
    from tests.real.tiny_gpt import Options

    with applied("reentrant-train"):
        trainee = Trainee(Options())
        for raising in (False, True, False):
            try:
                with reentrant_train(trainee.model, optimizer=trainee.optimizer):
                    trainee.train(2)
                    if raising and dist.get_rank() == 1:
                        raise Injected
            except Injected:
                pass
        interrupted = trainee.checksums()
        uninterrupted = Trainee(Options())
        uninterrupted.train(6)
    return interrupted, uninterrupted.checksums()


def test_one_rank_that_raises_after_its_last_collective_is_agreed_upon() -> None:
    first, second = spawn_ranks(_on_cpu, 2, _raises_on_one_rank_at_the_end, timeout=90)
    assert first[0].params == second[0].params
    for interrupted, uninterrupted in (first, second):
        assert interrupted == uninterrupted
