"""A ``train()`` that raised, at every stage of a step, can be called again; with data parallelism.

Other layouts, and what else can go wrong in a run, are in ``tests/faults``.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def _campaign(flags: dict[str, Any], stages: Sequence[str]) -> dict[tuple[str, str], tuple[Any, Any]]:
    from tests.real.faults import run, same_process_groups
    from tests.real.tiny_gpt import Options

    options = Options(**flags)
    with applied("reentrant-train", settings=SETTINGS):
        undisturbed = run(options, None, (0, 0))
        with same_process_groups():
            return {
                (stage, place): (undisturbed, run(options, stage, PLACES[place]))
                for stage in stages
                for place in PLACES
            }


@pytest.mark.parametrize(
    ("overlap", "stages"),
    [
        ("both", ("backward 1",)),
        *(pytest.param(overlap, STAGES, marks=pytest.mark.slow) for overlap in OVERLAPS),
    ],
)
def test_stages_on_all_ranks(overlap: str, stages: Sequence[str]) -> None:
    first, second = spawn_ranks(_on_cpu, 2, _campaign, OVERLAPS[overlap], stages, timeout=200)
    assert first.keys() == second.keys()
    for (stage, place), (undisturbed, outcome) in first.items():
        where = f"{stage}, {place}"
        undisturbed_2, outcome_2 = second[stage, place]
        assert outcome.end.params == outcome_2.end.params, f"{where}: parameters differ across ranks"
        assert outcome.at_reentry.params == outcome_2.at_reentry.params, f"{where}: stale at re-entry"
        if stage == "in step":
            continue
        assert outcome.losses[-1] == undisturbed.losses[-1], where
        assert (outcome.end, outcome_2.end) == (undisturbed.end, undisturbed_2.end), where


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
