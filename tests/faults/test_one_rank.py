"""One rank raises while its peer waits for it: an error in time, and no update that only one of them made."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_rl_patches import applied
from megatron_rl_patches.testing import RanksFailed, TinyModel
from tests.faults.groups import error_of, meet, short_lived_groups, timed_out, worlds_of
from tests.ranks import on_ranks
from tests.real.faults import PLACES, STAGES, Trainee, counting_updates, steps_done
from tests.real.test_interruption import OVERLAPS, SETTINGS

#: Sizes, overlap and place for each pair of ranks. Pairs run at the same time: they wait for most of it.
PAIRS: dict[str, list[tuple[dict[str, int], str, str]]] = {
    "data parallel": list(product([{}], OVERLAPS, ("first batch", "later step"))),
    "model parallel": list(product([{"tp": 2}, {"pp": 2}], ["both"], ("first batch", "later step"))),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PAIRS)
@on_ranks(lambda kind: 2 * len(PAIRS[kind]), timeout=240)
def test_error_in_time(kind: str, tmp_path: Path) -> None:
    with applied("reentrant-train", settings=SETTINGS), worlds_of(2, tmp_path, "pair") as pair:
        sizes, overlap, place = PAIRS[kind][pair]
        options = TinyModel(**sizes, **OVERLAPS[overlap])
        before = _new_model(options, tmp_path, f"{pair}, before")
        for stage in STAGES:
            error, updates = _outcome(options, stage, place, tmp_path, f"{pair}, {stage}")
            done, failing_step = PLACES[place]
            assert updates == done + steps_done(stage, failing_step), (overlap, stage, place)
            # After the call's last step, the peer waits only for a gather of parameters.
            gathers = not sizes and overlap == "both"
            waits = (stage, place) != ("after step", "later step") or gathers
            if dist.get_rank() == 0 and waits:
                assert timed_out(error), (overlap, stage, place, error)
        assert _new_model(options, tmp_path, f"{pair}, after") == before


def _outcome(options: TinyModel, stage: str, place: str, folder: Path, name: str) -> tuple[str, int]:
    """Return the error of the peer, and how many updates this rank has made."""
    done, failing_step = PLACES[place]
    error = ""
    with short_lived_groups(folder, name) as store:
        trainee = Trainee(options)
        with counting_updates(trainee.optimizer) as updates:
            trainee.train(done)
            if dist.get_rank() == 1:
                trainee.fail(stage, failing_step)
            else:
                error = error_of(lambda: trainee.train(2))
        meet(store, "after the error", dist.get_rank())
    trainee.release()
    return error, len(updates)


def _new_model(options: TinyModel, folder: Path, name: str) -> str:
    """Return what a new model's weights are after a step, in new groups."""
    with short_lived_groups(folder, name):
        trainee = Trainee(options)
        trainee.train(1)
        whole = trainee.checksums().whole
    trainee.release()
    return whole


@pytest.mark.slow
@on_ranks(2, timeout=90)
def test_a_lone_retry_whose_reductions_its_peer_takes_for_its_own(tmp_path: Path) -> None:
    """Those of rank 1's second forward meet those of rank 0's backward, which are of the same size."""
    with applied("reentrant-train", settings=SETTINGS), short_lived_groups(tmp_path, "groups") as store:
        trainee = Trainee(TinyModel(tp=2))
        trainee.train(1)
        before = trainee.checksums()
        if dist.get_rank() == 1:
            trainee.fail("forward 1", 0)
        error = error_of(lambda: trainee.train(1))
        meet(store, "after the error", dist.get_rank())
        assert timed_out(error)
        assert trainee.checksums() == before


@on_ranks(2, timeout=90)
def _mismatch(folder: Path) -> None:
    with applied("reentrant-train", settings=SETTINGS), short_lived_groups(folder, "groups"):
        trainee = Trainee(TinyModel())
        trainee.train(1)
        if dist.get_rank() == 1:
            trainee.fail("before forward", 0)
        trainee.train(1)


def test_a_lone_retry_with_overlapped_gather_is_never_silent(tmp_path: Path) -> None:
    """Its entry is a collective, which the peer takes for one of the step's."""
    with pytest.raises(RanksFailed) as failed:
        _mismatch(folder=tmp_path)
    assert sorted(failed.value.ranks) == [0, 1], failed.value
