"""``check_normalization`` on losses with known faults, on this package's own losses, and on a train step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import PolicyOptions
from megatron_rl_patches.testing import SPLITS, Split, check_normalization, normalization
from tests.real import normalization_losses as losses

pytestmark = pytest.mark.runs("losses", ranks=[1, 2])

ONLY_CP = {"CP 2": SPLITS["CP 2"]}
TOKENS = "divide by the step's mean tokens per microbatch, not by its own"
SAMPLES = TOKENS.replace("tokens", "samples")
TIMES_CP = "multiply the loss by the context-parallel size"


def weights_of(report: normalization.NormalizationReport, split: str) -> tuple[float, ...]:
    [row] = [row for row in report.rows if row.split == split]
    return row.weights


@pytest.mark.parametrize("calculate_per_token_loss", [True, False])
@pytest.mark.parametrize("normalization", ["token", "sequence"])
@pytest.mark.slow
def test_own_losses_weigh_the_same(normalization: Any, calculate_per_token_loss: bool) -> None:
    loss_func = partial(losses.of_package, PolicyOptions(normalization=normalization))
    report = check_normalization(
        loss_func, losses.global_batch(), calculate_per_token_loss=calculate_per_token_loss
    )
    assert report.same, report
    assert report.remedy == ""
    assert [row.split for row in report.rows] == list(SPLITS)


@pytest.mark.slow
def test_a_sum_with_its_count_needs_the_setting() -> None:
    """As the warning of ``reentrant-train`` says."""
    assert check_normalization(
        losses.over_the_step, losses.global_batch(), calculate_per_token_loss=True
    ).same
    report = check_normalization(losses.over_the_step, losses.global_batch())
    assert not report.same
    assert report.remedy == "calculate_per_token_loss=True"


def test_a_mean_over_the_microbatch() -> None:
    report = check_normalization(losses.over_its_microbatch, losses.global_batch())
    assert report.remedy == TOKENS
    # 15 tokens weigh 15 / 2 together in each microbatch, and 6 as much.
    expected = [21 / 2 / 15] * 3 + [21 / 2 / 6] * 3
    assert weights_of(report, "2 microbatches") == pytest.approx(expected, rel=1e-3)
    assert weights_of(report, "CP 2") == ()
    mended = check_normalization(losses.mended, losses.global_batch())
    assert mended.same, mended


@pytest.mark.slow
def test_a_mean_over_the_samples_of_the_microbatch() -> None:
    """Which shows where microbatches have different numbers of samples alone."""
    report = check_normalization(losses.over_its_samples, losses.global_batch())
    assert {row.split for row in report.rows if not row.same} == {n for n in SPLITS if "budget" in n}
    assert report.remedy == SAMPLES


@pytest.mark.parametrize("calculate_per_token_loss", [True, False])
def test_context_parallelism_that_is_forgotten(calculate_per_token_loss: bool) -> None:
    report = check_normalization(
        losses.without_context_parallelism,
        losses.global_batch(),
        {"CP 2": SPLITS["CP 2"]},
        calculate_per_token_loss=calculate_per_token_loss,
    )
    [row] = report.rows
    assert row.factor == pytest.approx(0.5, rel=1e-4)
    assert row.residual < 1e-5
    assert not row.same
    assert report.remedy == TIMES_CP


@pytest.mark.slow
def test_a_mean_over_the_tokens_of_a_rank() -> None:
    """Tokens of one sample weigh differently, and no setting helps."""
    report = check_normalization(losses.over_its_rank, losses.global_batch(), ONLY_CP)
    [row] = report.rows
    assert row.per == "token"
    # 16 of 21 tokens are on one rank, 5 on the other.
    assert {round(weight, 2) for weight in row.weights} == {0.66, 2.1}
    assert report.remedy == ""


@pytest.mark.slow
def test_a_train_step() -> None:
    """One that forgets microbatches after the first, so that some samples have no weight."""
    split = {"2 microbatches": Split(microbatches=2)}
    report = check_normalization(losses.train_step, losses.global_batch(), split, is_train_step=True)
    assert report.same, report
    report = check_normalization(losses.half_a_train_step, losses.global_batch(), split, is_train_step=True)
    assert [round(weight, 2) for weight in report.rows[0].weights] == [1.4, 1.4, 1.4, 0, 0, 0]


def test_a_loss_of_nothing() -> None:
    with pytest.raises(InvalidInputError, match="gradient of the undivided batch has the norm 0"):
        check_normalization(losses.of_nothing, losses.global_batch(), ONLY_CP)
