"""A ``train()`` that raised, at every stage of a step, can be called again."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

from megatron_rl_patches import Settings, applied
from megatron_rl_patches.testing import cpu_backend, spawn_ranks

STEPS, MICROBATCHES = 4, 2
SETTINGS = Settings(train_functions=("tests.real.tiny_gpt:train",))
OVERLAPS = {
    "no overlap": {"overlap_grad_reduce": False, "overlap_param_gather": False},
    "grad reduce": {"overlap_grad_reduce": True, "overlap_param_gather": False},
    "both": {"overlap_grad_reduce": True, "overlap_param_gather": True},
}
# (steps done by calls before, step of the failing call): the very first batch, a first step, a later step.
PLACES = {"first batch": (0, 0), "first step": (1, 0), "later step": (1, 1)}


@dataclass
class Outcome:
    """One rank's account of an interrupted run."""

    losses: list[float]
    at_reentry: str
    params: str
    whole: str
    problem: str = ""


def _checksums(model: Any, optimizer: Any) -> tuple[str, str]:
    """Of the parameters alone, which all data-parallel ranks share, and with the optimizer's shard."""
    from tests.real import tiny_gpt

    class NoOptimizer:
        param_groups: tuple[()] = ()

    return tiny_gpt.checksum(model, NoOptimizer), tiny_gpt.checksum(model, optimizer)


def _run(options: Any, stage: str | None, place: tuple[int, int]) -> Outcome:
    from tests.real import faults, tiny_gpt

    model, optimizer = tiny_gpt.build(options)
    data = tiny_gpt.data_iterators(options)
    losses: list[float] = []

    def train(steps: int) -> None:
        for iterator in data:
            iterator._microbatch = done * MICROBATCHES
        losses.extend(tiny_gpt.train(model, optimizer, data, [MICROBATCHES] * steps, options))

    problem = ""
    done, failing_step = place
    if done:
        done = 0
        train(place[0])
        done = place[0]
    if stage is not None:
        error = None
        try:
            with faults.fault(stage, failing_step, optimizer):
                train(2)
        except faults.Injected as raised:
            error = raised
        if error is None:
            return Outcome([], "", "", "", "the fault was not raised")
        if error.__cause__ or error.__context__ or "recovery" in "".join(traceback.format_exception(error)):
            problem = "exception changed"
        done += failing_step + (stage in faults.AFTER_UPDATE + faults.IN_STEP)
    at_first_step: list[str] = []
    call_step = tiny_gpt.train_step

    def train_step(*args: Any) -> float:
        at_first_step.append(_checksums(model, optimizer)[0])
        return call_step(*args)

    with mock.patch.object(tiny_gpt, "train_step", train_step):
        train(STEPS - done)
    return Outcome(losses, at_first_step[0], *_checksums(model, optimizer), problem)


def _campaign(flags: dict[str, Any]) -> dict[tuple[str, str], tuple[Outcome, Outcome]]:
    from tests.real.faults import STAGES
    from tests.real.tiny_gpt import Options

    options = Options(**flags)
    with applied("reentrant-train", settings=SETTINGS):
        undisturbed = _run(options, None, (0, 0))
        return {
            (stage, place): (undisturbed, _run(options, stage, PLACES[place]))
            for stage in STAGES
            for place in PLACES
        }


def _on_cpu(function: Any, *args: Any) -> Any:
    with cpu_backend():
        return function(*args)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_every_stage_on_all_ranks(overlap: str) -> None:
    first, second = spawn_ranks(_on_cpu, 2, _campaign, OVERLAPS[overlap], timeout=200)
    assert first.keys() == second.keys()
    for (stage, place), (undisturbed, outcome) in first.items():
        where = f"{stage}, {place}"
        assert outcome.problem == second[stage, place][1].problem == "", where
        assert outcome.params == second[stage, place][1].params, f"{where}: parameters differ across ranks"
        assert outcome.at_reentry == second[stage, place][1].at_reentry, f"{where}: stale at re-entry"
        if stage == "in step":
            continue
        assert outcome.params == undisturbed.params, where
        assert outcome.losses[-1] == undisturbed.losses[-1], where
        assert (outcome.whole, second[stage, place][1].whole) == (
            undisturbed.whole,
            second[stage, place][0].whole,
        ), where


# --- one rank only: its peers are in collectives, which its retry has to meet

LINE_UP = [("before forward", 0), ("before forward", 1), ("forward 1", 1), ("after step", 1)]


def _one_rank(
    flags: dict[str, Any], stage: str, failing_step: int, failing_rank: int | None
) -> tuple[str, str]:
    import torch.distributed as dist

    from tests.real import faults, tiny_gpt

    options = tiny_gpt.Options(**flags)
    model, optimizer = tiny_gpt.build(options)
    data = tiny_gpt.data_iterators(options)

    def train(steps: int) -> None:
        tiny_gpt.train(model, optimizer, data, [MICROBATCHES] * steps, options)

    train(1)
    if dist.get_rank() == failing_rank:
        with pytest.raises(faults.Injected), faults.fault(stage, failing_step, optimizer):
            train(2)
        done = 1 + failing_step + (stage in faults.AFTER_UPDATE)
        for iterator in data:
            iterator._microbatch = done * MICROBATCHES
        if done < 3:
            train(3 - done)
    else:
        train(2)
    train(1)
    return _checksums(model, optimizer)


def _one_rank_campaign(flags: dict[str, Any]) -> dict[Any, tuple[tuple[str, str], tuple[str, str]]]:
    with applied("reentrant-train", settings=SETTINGS):
        undisturbed = _one_rank(flags, "", 0, None)
        return {(stage, step): (undisturbed, _one_rank(flags, stage, step, 1)) for stage, step in LINE_UP}


@pytest.mark.parametrize("overlap", ["no overlap", "grad reduce"])
def test_one_rank_alone_may_retry_while_no_collective_is_under_way(overlap: str) -> None:
    for outcomes in spawn_ranks(_on_cpu, 2, _one_rank_campaign, OVERLAPS[overlap], timeout=120):
        for where, (undisturbed, outcome) in outcomes.items():
            assert outcome == undisturbed, where


def _raises_on_one_rank_at_the_end() -> tuple[str, str, str]:
    import torch.distributed as dist

    from megatron_rl_patches.reentry import reentrant_train
    from tests.real import faults, tiny_gpt

    options = tiny_gpt.Options()
    model, optimizer = tiny_gpt.build(options)
    data = tiny_gpt.data_iterators(options)
    with applied("reentrant-train"):
        for raising in (False, True, False):
            try:
                with reentrant_train(model, optimizer=optimizer):
                    tiny_gpt.train(model, optimizer, data, [MICROBATCHES] * 2, options)
                    if raising and dist.get_rank() == 1:
                        raise faults.Injected
            except faults.Injected:
                pass
        interrupted = _checksums(model, optimizer)
        model, optimizer = tiny_gpt.build(options)
        tiny_gpt.train(model, optimizer, tiny_gpt.data_iterators(options), [MICROBATCHES] * 6, options)
    return (*interrupted, _checksums(model, optimizer)[1])


def test_one_rank_that_raises_after_its_last_collective_is_agreed_upon() -> None:
    first, second = spawn_ranks(_on_cpu, 2, _raises_on_one_rank_at_the_end, timeout=90)
    assert first[0] == second[0]
    for _, interrupted, uninterrupted in (first, second):
        assert interrupted == uninterrupted
