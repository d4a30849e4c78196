"""``check_normalization`` on losses with known faults, on this package's own losses, and on a train step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import DistillationOptions, PolicyOptions
from megatron_rl_patches.testing import SPLITS, Split, check_normalization
from tests.real import normalization_losses as losses

pytestmark = pytest.mark.runs("losses", ranks=[1, 2])

ONLY_CP = {"CP 2": SPLITS["CP 2"]}
ONE_RANK = {name: SPLITS[name] for name in ("2 microbatches", "uneven microbatches")}


@pytest.mark.parametrize("calculate_per_token_loss", [True, False])
@pytest.mark.parametrize("normalization", ["token", "sequence"])
@pytest.mark.parametrize("options", [PolicyOptions, DistillationOptions])
@pytest.mark.slow
def test_own_losses_weigh_the_same(options: Any, normalization: Any, calculate_per_token_loss: bool) -> None:
    loss_func = partial(losses.of_package, options(normalization=normalization))
    report = check_normalization(
        loss_func, losses.global_batch(), calculate_per_token_loss=calculate_per_token_loss
    )
    assert report.same, report
    assert list(report.differences) == list(SPLITS)


@pytest.mark.parametrize(
    ("part", "different"),
    [
        ("microbatch", list(ONE_RANK)),
        ("samples", ["uneven microbatches"]),  # the others have the same number of samples each
    ],
)
def test_means_over_a_part_of_the_batch(part: str, different: list[str]) -> None:
    report = check_normalization(partial(losses.mean_over, part), losses.global_batch(), ONE_RANK)
    assert report.different == different


def test_context_parallelism_that_is_forgotten() -> None:
    forgetful = partial(losses.with_its_count, forgets_cp=True)
    report = check_normalization(forgetful, losses.global_batch(), ONLY_CP, calculate_per_token_loss=True)
    assert report.differences == {"CP 2": pytest.approx(0.5, rel=1e-4)}


@pytest.mark.slow
def test_a_train_step() -> None:
    """One that forgets microbatches after the first, so that some samples have no weight."""
    split = {"2 microbatches": Split(microbatches=2)}
    for step, same in ((losses.train_step, True), (losses.half_a_train_step, False)):
        report = check_normalization(step, losses.global_batch(), split, is_train_step=True)
        assert report.same is same, report


def test_a_loss_of_nothing() -> None:
    with pytest.raises(InvalidInputError, match="gradient of the undivided batch has the norm 0"):
        check_normalization(losses.of_nothing, losses.global_batch(), ONLY_CP)
