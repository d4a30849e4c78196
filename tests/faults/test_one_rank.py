"""One rank raises while its peer waits for it: an error in time, and no update that only one of them made."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_rl_patches import applied
from megatron_rl_patches.testing import RanksFailed, cpu_backend, spawn_ranks
from tests.faults.groups import error_of, meet, short_lived_groups, timed_out, worlds_of
from tests.real.stages import PLACES, STAGES, steps_done
from tests.real.test_interruption import OVERLAPS, SETTINGS


class Case(NamedTuple):
    overlap: str
    stage: str  # where rank 1 raises
    place: str


class Outcome(NamedTuple):
    """What one rank reports."""

    error: str  # of the peer
    updates: int


PLACES_TRIED = ("first batch", "later step")


def _pairs(sizes: dict[str, int]) -> list[tuple[str, str]]:
    """A pair of ranks for each, at the same time: they wait for most of it."""
    return list(product(["both"] if sizes else OVERLAPS, PLACES_TRIED))


def _campaign(folder: str, sizes: dict[str, int]) -> tuple[dict[Case, Outcome], str, str]:
    """What became of this rank in its pair's cases.

    Also what a new model's weights are after a step, in new groups: before the first case and after the last.
    """
    from tests.real.tiny_gpt import Options, Parallelism

    with (
        cpu_backend(),
        applied("reentrant-train", settings=SETTINGS),
        worlds_of(2, Path(folder), "pair") as pair,
    ):
        overlap, place = _pairs(sizes)[pair]
        options = Options(parallelism=Parallelism(**sizes), **OVERLAPS[overlap])
        cases = [Case(overlap, stage, place) for stage in STAGES]
        before = _new_model(options, Path(folder), f"{pair}, before")
        outcomes = {case: _outcome(options, case, Path(folder)) for case in cases}
        return outcomes, before, _new_model(options, Path(folder), f"{pair}, after")


def _outcome(options: Any, case: Case, folder: Path) -> Outcome:
    import torch.distributed as dist

    from tests.real.faults import Trainee, counting_updates

    done, failing_step = PLACES[case.place]
    error = ""
    with short_lived_groups(folder, f"{case}") as store:
        trainee = Trainee(options)
        with counting_updates(trainee.optimizer) as updates:
            trainee.train(done)
            if dist.get_rank() == 1:
                trainee.fail(case.stage, failing_step)
            else:
                error = error_of(lambda: trainee.train(2))
        meet(store, "after the error", dist.get_rank())
    trainee.release()
    return Outcome(error, len(updates))


def _new_model(options: Any, folder: Path, name: str) -> str:
    from tests.real.faults import Trainee

    with short_lived_groups(folder, name):
        trainee = Trainee(options)
        trainee.train(1)
        whole = trainee.checksums().whole
    trainee.release()
    return whole


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_error_in_time(sizes: dict[str, int], tmp_path: Path) -> None:
    ranks = spawn_ranks(_campaign, 2 * len(_pairs(sizes)), str(tmp_path), sizes, timeout=240)
    for number, (outcomes, before, after) in enumerate(ranks):
        assert after == before
        assert len(outcomes) == len(STAGES)
        for case, outcome in outcomes.items():
            done, failing_step = PLACES[case.place]
            assert outcome.updates == done + steps_done(case.stage, failing_step), (case, outcome)
            if number % 2 == 0 and not _has_nothing_to_wait_for(case, sizes):
                assert timed_out(outcome.error), (case, outcome)


def _has_nothing_to_wait_for(case: Case, sizes: dict[str, int]) -> bool:
    """After the call's last step, unless the call ends with a gather of parameters."""
    gathers = not sizes and case.overlap == "both"
    return (case.stage, case.place) == ("after step", "later step") and not gathers


def _retry(folder: str) -> tuple[str, bool]:
    with cpu_backend(), applied("reentrant-train", settings=SETTINGS):
        import torch.distributed as dist

        from tests.real.faults import Trainee
        from tests.real.tiny_gpt import Options, Parallelism

        with short_lived_groups(Path(folder), "groups") as store:
            trainee = Trainee(Options(parallelism=Parallelism(tp=2)))
            trainee.train(1)
            before = trainee.checksums()
            if dist.get_rank() == 1:
                trainee.fail("forward 1", 0)
            error = error_of(lambda: trainee.train(1))
            meet(store, "after the error", dist.get_rank())
            return error, trainee.checksums() != before


@pytest.mark.slow
def test_a_lone_retry_whose_reductions_its_peer_takes_for_its_own(tmp_path: Path) -> None:
    """Those of rank 1's second forward meet those of rank 0's backward, which are of the same size."""
    for error, weights_changed in spawn_ranks(_retry, 2, str(tmp_path), timeout=90):
        assert timed_out(error)
        assert not weights_changed


def _mismatch(folder: str) -> None:
    with cpu_backend(), applied("reentrant-train", settings=SETTINGS):
        import torch.distributed as dist

        from tests.real.faults import Trainee
        from tests.real.tiny_gpt import Options

        with short_lived_groups(Path(folder), "groups"):
            trainee = Trainee(Options())
            trainee.train(1)
            if dist.get_rank() == 1:
                trainee.fail("before forward", 0)
            trainee.train(1)


def test_a_lone_retry_with_overlapped_gather_is_never_silent(tmp_path: Path) -> None:
    """Its entry is a collective, which the peer takes for one of the step's."""
    with pytest.raises(RanksFailed) as failed:
        spawn_ranks(_mismatch, 2, str(tmp_path), timeout=90)
    assert sorted(failed.value.ranks) == [0, 1], failed.value
