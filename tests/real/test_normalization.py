"""``check_normalization`` on losses with known faults, on this package's own losses, and on a train step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import DistillationOptions, PolicyOptions
from megatron_rl_patches.testing import SPLITS, NormalizationReport, Split, check_normalization
from tests.real import normalization_losses as losses

pytestmark = pytest.mark.runs("losses", ranks=[1, 2])

ONLY_CP = {"CP 2": SPLITS["CP 2"]}


def different(report: NormalizationReport) -> set[str]:
    return {row.split for row in report.rows if not row.same}


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
    assert [row.split for row in report.rows] == list(SPLITS)


@pytest.mark.slow
def test_a_sum_with_its_count_needs_the_setting() -> None:
    """As the warning of ``reentrant-train`` says."""
    assert check_normalization(
        losses.over_the_step, losses.global_batch(), calculate_per_token_loss=True
    ).same
    report = check_normalization(losses.over_the_step, losses.global_batch())
    assert different(report) == {*SPLITS} - {"without masked samples"}


@pytest.mark.parametrize("of", ["likelihood", "value", "distillation"])
def test_a_mean_over_the_microbatch(of: str) -> None:
    splits = {name: SPLITS[name] for name in ("2 microbatches", "token budget", "without masked samples")}
    loss_func = partial(losses.over_its_microbatch, of=of)
    report = check_normalization(loss_func, losses.global_batch(), splits)
    assert different(report) == {"2 microbatches", "token budget"}
    assert not any(row.is_uniform for row in report.rows if not row.same)


def test_samples_without_a_counted_token() -> None:
    """Slime and miles count one token for each of the two, besides the 21 that are not masked."""
    splits = {name: SPLITS[name] for name in ("2 microbatches", "token budget", "without masked samples")}
    report = check_normalization(
        losses.counting_masked_samples, losses.global_batch(), splits, calculate_per_token_loss=True
    )
    assert different(report) == {"without masked samples"}
    assert report.rows[-1].is_uniform
    assert report.rows[-1].factor == pytest.approx(23 / 21, rel=1e-4)


@pytest.mark.slow
def test_a_mean_over_the_samples_of_the_microbatch() -> None:
    """Which shows where microbatches have different numbers of samples alone, and counts masked ones."""
    report = check_normalization(losses.over_its_samples, losses.global_batch())
    assert different(report) == {n for n in SPLITS if "budget" in n} | {"without masked samples"}
    assert report.rows[-1].factor == pytest.approx(8 / 6, rel=1e-4)


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


@pytest.mark.slow
def test_a_mean_over_the_tokens_of_a_rank() -> None:
    """Tokens of one sample weigh differently."""
    report = check_normalization(losses.over_its_rank, losses.global_batch(), ONLY_CP)
    [row] = report.rows
    assert not row.is_uniform


@pytest.mark.slow
def test_a_train_step() -> None:
    """One that forgets microbatches after the first, so that some samples have no weight."""
    split = {"2 microbatches": Split(microbatches=2)}
    report = check_normalization(losses.train_step, losses.global_batch(), split, is_train_step=True)
    assert report.same, report
    report = check_normalization(losses.half_a_train_step, losses.global_batch(), split, is_train_step=True)
    assert not report.rows[0].is_uniform


def test_a_loss_of_nothing() -> None:
    with pytest.raises(InvalidInputError, match="gradient of the undivided batch has the norm 0"):
        check_normalization(losses.of_nothing, losses.global_batch(), ONLY_CP)
