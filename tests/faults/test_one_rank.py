"""One rank raises while its peers wait for it: an error on every rank in time, and no wrong weights."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_rl_patches import applied
from megatron_rl_patches.testing import RanksFailed, cpu_backend, spawn_ranks
from tests.faults.groups import error_of, timed_out
from tests.real.test_interruption import OVERLAPS, SETTINGS


class Case(NamedTuple):
    sizes: dict[str, int]
    overlap: str
    stage: str  # where rank 1 raises
    retries: bool = False  # at once, while rank 0 is in the middle of the step


CASES = [
    Case({}, "grad reduce", "forward 1"),
    Case({}, "both", "backward 1"),
    Case({}, "both", "in step"),
    Case({"tp": 2}, "both", "forward 0"),
    # The all-reduces of its second forward meet those of the peer's backward, which are of the same size.
    Case({"tp": 2}, "both", "forward 1", retries=True),
    Case({"pp": 2}, "both", "backward 0"),
    Case({"pp": 2}, "both", "before step"),
]


class Outcome(NamedTuple):
    """One rank's account."""

    error: str  # of the step that the peer broke off, or of the retry
    weights_changed: bool
    works_again: bool  # with new groups


def _campaign(folder: str) -> list[Outcome]:
    with cpu_backend(), applied("reentrant-train", settings=SETTINGS):
        return [_outcome(case, Path(folder), str(number)) for number, case in enumerate(CASES)]


def _outcome(case: Case, folder: Path, name: str) -> Outcome:
    import torch.distributed as dist

    from tests.faults.groups import meet, short_lived_groups
    from tests.real.faults import Trainee
    from tests.real.tiny_gpt import Options, Parallelism

    options = Options(parallelism=Parallelism(**case.sizes), **OVERLAPS[case.overlap])
    error = ""
    with short_lived_groups(folder, name) as store:
        trainee = Trainee(options)
        trainee.train(1)
        before = trainee.checksums()
        if dist.get_rank() == 1:
            trainee.fail(case.stage, 0)
        if dist.get_rank() == 0 or case.retries:
            error = error_of(lambda: trainee.train(1))
        changed = trainee.checksums() != before
        meet(store, "after the error", dist.get_rank())
    with short_lived_groups(folder, f"{name} again"):
        trainee = Trainee(options)
        trainee.train(1)
        return Outcome(error, changed, trainee.checksums() == before)


@pytest.mark.slow
def test_errors_in_time(tmp_path: Path) -> None:
    first, second = spawn_ranks(_campaign, 2, str(tmp_path), timeout=240)
    for case, one, other in zip(CASES, first, second, strict=True):
        assert timed_out(one.error), (case, one)
        assert timed_out(other.error) == case.retries, (case, other)
        assert one.weights_changed == other.weights_changed == (case.stage == "in step"), case
        assert one.works_again and other.works_again, case


def _mismatch(folder: str) -> None:
    with cpu_backend(), applied("reentrant-train", settings=SETTINGS):
        import torch.distributed as dist

        from tests.faults.groups import short_lived_groups
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
