"""``check_normalization``: how a batch is cut, what is refused, and what a report says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.testing import NormalizationReport, Split, check_normalization
from megatron_rl_patches.testing import normalization as module
from megatron_rl_patches.testing.normalization import SplitResult


def samples(*lengths: tuple[int, int]) -> list[dict[str, Any]]:
    return [
        {"tokens": torch.zeros(prompt + response).long(), "loss_mask": torch.ones(response)}
        for prompt, response in lengths
    ]


BATCH = samples((2, 9), (1, 7), (5, 1), (1, 4), (1, 2), (2, 1))


def cut(split: Split, batch: list[dict[str, Any]] = BATCH) -> list[list[list[int]]]:
    return [
        [[len(sample["tokens"]) for sample in samples] for samples in replica] for replica in split.cut(batch)
    ]


def test_equal_numbers_of_samples() -> None:
    assert cut(Split(dp=3, microbatches=2)) == [[[11], [8]], [[6], [5]], [[3], [3]]]
    with pytest.raises(InvalidInputError, match=r"6 samples, and .*dp=2.* needs a multiple of 4"):
        Split(dp=2, microbatches=2).cut(BATCH)


def test_a_token_budget() -> None:
    assert cut(Split(token_budget="longest")) == [[[11], [8], [6, 5], [3, 3]]]
    assert cut(Split(token_budget=14)) == [[[11], [8, 6], [5, 3, 3]]]
    assert cut(Split(dp=2, token_budget="longest")) == [[[11], [8]], [[6, 5], [3, 3]]]


def test_samples_that_are_masked() -> None:
    masked = {**BATCH[0], "loss_mask": torch.zeros(9)}
    assert cut(Split(without_masked=True), [masked, *BATCH[:2]]) == [[[11, 8]]]
    assert cut(Split(), [masked, *BATCH[:2]]) == [[[11, 11, 8]]]


def test_replicas_have_the_same_number_of_microbatches() -> None:
    assert cut(Split(dp=2, token_budget=17)) == [[[11], [8]], [[6, 5], [3, 3]]]
    with pytest.raises(InvalidInputError, match=r"too few samples for .*dp=7"):
        Split(dp=7, token_budget=20).cut(BATCH)


def loss_func(microbatch: Any, logits: Any) -> None:
    pytest.fail("a rank has started")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": []}, "batch and splits must not be empty"),
        ({"splits": {}}, "batch and splits must not be empty"),
        ({"batch": samples((2, 3), (4, 5)), "splits": {"": Split(without_masked=True)}}, "must not be empty"),
        ({"batch": [{"tokens": torch.zeros(3)}]}, r"sample 0 of the batch needs .* loss_mask"),
        ({"batch": samples((0, 3))}, "sample 0 of the batch needs .* one token of a prompt"),
        ({"batch": samples((2, 3), (4, 3))}, "same number of unmasked tokens"),
        ({"vocab_size": 0}, "sample 0 has tokens beyond vocab_size=0"),
        ({"splits": {"none": Split(dp=0)}}, "split 'none': sizes must be positive"),
        ({"splits": {"many": Split(microbatches=4)}}, "needs a multiple of 4"),
        ({"batch": samples((2, 1), (2, 2))}, "split 'CP 2': .* context-parallel rank 0"),
        ({"loss_func_or_train_step": lambda *_: None}, "pass a module-level function"),
    ],
)
def test_bad_input_is_refused_before_a_rank_starts(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "spawn_ranks", loss_func)
    arguments = {"loss_func_or_train_step": loss_func, "batch": BATCH, **changes}
    with pytest.raises(InvalidInputError, match=message):
        check_normalization(**arguments)


def test_a_report_is_a_table() -> None:
    rows = (
        SplitResult("DP 2", True, 1.0, 1e-7),
        SplitResult("CP 2", False, 0.5, 1e-7),
        SplitResult("dynamic", False, 1.1, 0.3),
    )
    assert str(NormalizationReport(rows)).splitlines() == [
        "split                   factor  residual same as undivided",
        "DP 2                    1       1.0e-07  yes",
        "CP 2                    0.5     1.0e-07  no: 0.5 times as large",
        "dynamic                 1.1     3.0e-01  no: tokens have other weights",
    ]
    assert [report.same for report in (NormalizationReport(rows), NormalizationReport(rows[:1]))] == [0, 1]
