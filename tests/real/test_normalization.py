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


@pytest.mark.slow
def test_a_sum_with_its_count_needs_the_setting() -> None:
    """As the warning of ``reentrant-train`` says."""
    assert check_normalization(
        losses.over_the_step, losses.global_batch(), calculate_per_token_loss=True
    ).same
    assert check_normalization(losses.over_the_step, losses.global_batch()).different == list(SPLITS)


@pytest.mark.parametrize("of", ["likelihood", "value", "distillation"])
def test_a_mean_over_the_microbatch(of: str) -> None:
    loss_func = partial(losses.over_its_microbatch, of=of)
    report = check_normalization(loss_func, losses.global_batch(), ONE_RANK)
    assert report.different == list(ONE_RANK)


def test_a_mean_over_the_samples_of_the_microbatch() -> None:
    """Which shows where microbatches have different numbers of samples alone."""
    report = check_normalization(losses.over_its_samples, losses.global_batch(), ONE_RANK)
    assert report.different == ["uneven microbatches"]


@pytest.mark.parametrize("calculate_per_token_loss", [True, False])
def test_context_parallelism_that_is_forgotten(calculate_per_token_loss: bool) -> None:
    report = check_normalization(
        losses.without_context_parallelism,
        losses.global_batch(),
        ONLY_CP,
        calculate_per_token_loss=calculate_per_token_loss,
    )
    assert report.differences == {"CP 2": pytest.approx(0.5, rel=1e-4)}


@pytest.mark.slow
def test_a_mean_over_the_tokens_of_a_rank() -> None:
    """Tokens of one sample weigh differently."""
    report = check_normalization(losses.over_its_rank, losses.global_batch(), ONLY_CP)
    assert report.different == ["CP 2"]


@pytest.mark.slow
def test_a_train_step() -> None:
    """One that forgets microbatches after the first, so that some samples have no weight."""
    split = {"2 microbatches": Split(microbatches=2)}
    report = check_normalization(losses.train_step, losses.global_batch(), split, is_train_step=True)
    assert report.same, report
    report = check_normalization(losses.half_a_train_step, losses.global_batch(), split, is_train_step=True)
    assert not report.same


def test_a_loss_of_nothing() -> None:
    with pytest.raises(InvalidInputError, match="gradient of the undivided batch has the norm 0"):
        check_normalization(losses.of_nothing, losses.global_batch(), ONLY_CP)
