"""Ctrl-C anywhere in ``train()``, and again while it is cleaned up after; SIGTERM on one rank."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from megatron_rl_patches import applied
from megatron_rl_patches.testing import RanksFailed, cpu_backend, spawn_ranks
from tests.faults.calls import Watched, first_and_last, interrupted_after
from tests.real.test_interruption import SETTINGS

# Not the optimizer: its calls are those of the rank's shard. Not testing/: it stands for CUDA.
PARTS = (
    "megatron_rl_patches/reentry/",
    "megatron/core/distributed/d",
    "megatron/core/distributed/param",
    "megatron/core/distributed/finalize",
    "megatron/core/pipeline_parallel/schedules",
    "tests/real/tiny_gpt",
)


@dataclass
class Report:
    """What one rank reports."""

    places: list[Any]
    losses: dict[int, float] = field(default_factory=dict)  # of steps after an interrupt
    undisturbed: list[float] = field(default_factory=list)
    ends: tuple[Any, ...] = ()

    def finish(self, trainee: Any) -> Report:
        from tests.real.faults import Trainee, same_process_groups
        from tests.real.tiny_gpt import Options

        with same_process_groups():
            other = Trainee(Options())
        other.train(trainee.done)
        self.undisturbed = other.losses
        self.ends = trainee.checksums(), other.checksums()
        return self

    def go_on(self, trainee: Any) -> None:
        trainee.train(1)
        self.losses[trainee.done - 1] = trainee.losses[-1]


def _interrupted_at_every_call() -> Report:
    with cpu_backend(), applied("reentrant-train", settings=SETTINGS):
        from tests.real.faults import Trainee, counting_updates
        from tests.real.tiny_gpt import Options

        trainee = Trainee(Options())
        watched = Watched(*PARTS)
        trainee.train(1)
        with watched.recorded() as calls:
            trainee.train(2)
        report = Report(first_and_last(calls))
        for place in report.places:
            with (
                counting_updates(trainee.optimizer) as updates,
                pytest.raises(KeyboardInterrupt),
                Watched(*PARTS).interrupted_at(place),
            ):
                trainee.train(2)
            trainee.done += len(updates)
            report.go_on(trainee)
        return report.finish(trainee)


@pytest.mark.slow
def test_interrupted_at_every_call() -> None:
    first, second = spawn_ranks(_interrupted_at_every_call, 2, timeout=200)
    assert first.places == second.places
    names = {call.function.partition(",")[0] for call in first.places}
    assert {"register_grad_ready", "start_grad_sync", "disable", "synchronize_interrupted"} <= names
    _same_as_undisturbed(first, second)


def _same_as_undisturbed(first: Report, second: Report) -> None:
    for report in (first, second):
        for place, (step, loss) in zip(report.places, report.losses.items(), strict=True):
            assert loss == report.undisturbed[step], f"{place}: step {step}"
        assert report.ends[0] == report.ends[1]
    assert first.ends[0].params == second.ends[0].params


def _interrupted_again() -> Report:
    with cpu_backend(), applied("reentrant-train", settings=SETTINGS):
        from megatron_rl_patches.reentry import recovery
        from tests.real.faults import Trainee, fault, interrupt
        from tests.real.tiny_gpt import Options

        trainee = Trainee(Options())
        trainee.train(1)
        report = Report([])
        for name in ("_close_abandoned_no_sync", "_reset_bucket_group"):  # cleaning up
            for stage, step in (("backward 1", 1), ("after step", 0)):
                report.places.append((stage, name))
                with (
                    pytest.raises(KeyboardInterrupt),
                    interrupted_after(recovery, name),
                    fault(stage, step, trainee.optimizer, interrupt),
                ):
                    trainee.train(2)
                trainee.done += 1
                report.go_on(trainee)
        for name in ("_any_rank_was", "_gather_parameters"):  # the next entry
            report.places.append(("entry", name))
            trainee.fail("after step", 0, interrupt)
            with pytest.raises(KeyboardInterrupt), interrupted_after(recovery, name):
                trainee.train(1)
            report.go_on(trainee)
        return report.finish(trainee)


def test_interrupted_again_while_cleaning_up() -> None:
    _same_as_undisturbed(*spawn_ranks(_interrupted_again, 2, timeout=120))


def _terminated(exits: bool) -> None:
    """Rank 1 ends in the middle of a step, while rank 0 waits for its gradients."""
    import torch.distributed as dist

    with cpu_backend(), applied("reentrant-train", settings=SETTINGS):
        from tests.real.faults import Trainee
        from tests.real.tiny_gpt import Options

        if exits:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        trainee = Trainee(Options())
        trainee.train(1)
        if dist.get_rank() == 1:
            trainee.fail("backward 1", 0, lambda stage: os.kill(os.getpid(), signal.SIGTERM))
        else:
            trainee.train(1)


@pytest.mark.parametrize(
    ("exits", "end"),
    [
        (False, "died with signal SIGTERM, no traceback"),
        pytest.param(True, "SystemExit: 143", marks=pytest.mark.slow),
    ],
)
def test_terminated_in_a_step(exits: bool, end: str) -> None:
    # Collectives would give up after 60 seconds, and the peer of a rank that is gone has two.
    with pytest.raises(RanksFailed) as failed:
        spawn_ranks(_terminated, 2, exits, timeout=120)
    assert failed.value.ranks == (1, 0)
    assert end in str(failed.value)
