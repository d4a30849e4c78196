"""Ctrl-C anywhere in ``train()``, and again while it is cleaned up after; SIGTERM on one rank."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import torch.distributed as dist

from megatron_rl_patches import applied
from megatron_rl_patches.reentry import recovery
from megatron_rl_patches.testing import RanksFailed, TinyModel
from tests.faults.calls import first_and_last, interrupted_after, watched
from tests.ranks import everywhere, on_ranks
from tests.real.faults import Trainee, counting_updates, fault, interrupt, same_process_groups
from tests.real.test_interruption import SETTINGS

# Not the optimizer: its calls are those of the rank's shard. Not testing/: it stands for CUDA.
PARTS = (
    "megatron_rl_patches/reentry/",
    "megatron/core/distributed/d",
    "megatron/core/distributed/param",
    "megatron/core/pipeline_parallel/schedules",
)


class Interrupted:
    """A model whose training is interrupted again and again, and goes on for a step after each interrupt."""

    def __init__(self) -> None:
        self.trainee = Trainee(TinyModel())
        self._losses: dict[str, tuple[int, float]] = {}  # after the interrupt at a place

    def go_on(self, place: object) -> None:
        self.trainee.train(1)
        self._losses[str(place)] = self.trainee.done - 1, self.trainee.losses[-1]

    def assert_same_as_undisturbed(self) -> None:
        with same_process_groups():
            undisturbed = Trainee(TinyModel())
        undisturbed.train(self.trainee.done)
        for place, (step, loss) in self._losses.items():
            assert loss == undisturbed.losses[step], f"{place}: step {step}"
        assert self.trainee.checksums() == undisturbed.checksums()
        first, second = everywhere((list(self._losses), self.trainee.checksums().params))
        assert first == second


@pytest.mark.slow
@on_ranks(2, timeout=200)
def test_interrupted_at_every_call() -> None:
    with applied("reentrant-train", settings=SETTINGS):
        run = Interrupted()
        run.trainee.train(1)
        with watched(*PARTS) as calls:
            run.trainee.train(2)
        places = first_and_last(calls)
        names = {call.function.partition(",")[0] for call in places}
        assert {"register_grad_ready", "start_grad_sync", "disable", "synchronize_interrupted"} <= names
        for place in places:
            with (
                counting_updates(run.trainee.optimizer) as updates,
                pytest.raises(KeyboardInterrupt),
                watched(*PARTS, at=place),
            ):
                run.trainee.train(2)
            run.trainee.done += len(updates)
            run.go_on(place)
        run.assert_same_as_undisturbed()


@on_ranks(2)
def test_interrupted_again_while_cleaning_up() -> None:
    with applied("reentrant-train", settings=SETTINGS):
        run = Interrupted()
        trainee = run.trainee
        trainee.train(1)
        for name in ("_close_abandoned_no_sync", "_reset_bucket_group"):  # cleaning up
            for stage, step in (("backward 1", 1), ("after step", 0)):
                with (
                    pytest.raises(KeyboardInterrupt),
                    interrupted_after(recovery, name),
                    fault(stage, step, trainee.optimizer, interrupt),
                ):
                    trainee.train(2)
                trainee.done += 1
                run.go_on((stage, name))
        for name in ("_any_rank_was", "_gather_parameters"):  # the next entry
            trainee.fail("after step", 0, interrupt)
            with pytest.raises(KeyboardInterrupt), interrupted_after(recovery, name):
                trainee.train(1)
            run.go_on(("entry", name))
        run.assert_same_as_undisturbed()


@on_ranks(2)
def _terminated(exits: bool) -> None:
    """Rank 1 ends in the middle of a step, while rank 0 waits for its gradients."""
    with applied("reentrant-train", settings=SETTINGS):
        if exits:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        trainee = Trainee(TinyModel())
        trainee.train(1)
        if dist.get_rank() == 1:
            trainee.fail("backward 1", 0, lambda stage: os.kill(os.getpid(), signal.SIGTERM))
        else:
            trainee.train(1)


@pytest.mark.parametrize("exits", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_terminated_in_a_step(exits: bool) -> None:
    # Collectives would give up after 60 seconds, and the peer of a rank that is gone has two.
    with pytest.raises(RanksFailed) as failed:
        _terminated(exits=exits)
    assert failed.value.ranks == (1, 0)
    assert ("SystemExit: 143" if exits else "died with signal SIGTERM, no traceback") in str(failed.value)
