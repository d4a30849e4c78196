"""``check_normalization``: how a batch is cut, what is refused, and what a report says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.testing import NormalizationReport, Split, check_normalization
from megatron_rl_patches.testing import normalization as module


def samples(*lengths: tuple[int, int]) -> list[dict[str, Any]]:
    return [
        {"tokens": torch.zeros(prompt + response).long(), "loss_mask": torch.ones(response)}
        for prompt, response in lengths
    ]


BATCH = samples((2, 9), (1, 7), (5, 1), (1, 4), (1, 2), (2, 1))


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (Split(dp=3, microbatches=2), [[[11], [8]], [[6], [5]], [[3], [3]]]),
        (Split(dp=2, microbatches=2, even=False), [[[11], [8]], [[6], [5, 3, 3]]]),
        (Split(microbatches=6, even=False), [[[11], [8], [6], [5], [3], [3]]]),
    ],
)
def test_cuts(split: Split, expected: list[list[list[int]]]) -> None:
    cut = [[[len(one["tokens"]) for one in piece] for piece in replica] for replica in split.cut(BATCH)]
    assert cut == expected


def loss_func(microbatch: Any, logits: Any) -> None:
    pytest.fail("a rank has started")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": []}, "batch and splits must not be empty"),
        ({"splits": {}}, "batch and splits must not be empty"),
        ({"batch": [{"tokens": torch.zeros(3)}]}, r"sample 0 of the batch needs .* loss_mask"),
        ({"batch": samples((0, 3))}, "sample 0 of the batch needs .* one token of a prompt"),
        ({"batch": samples((2, 3), (4, 3))}, "same number of unmasked tokens"),
        ({"splits": {"none": Split(dp=0)}}, "sizes must be positive, and they are .*dp=0"),
        ({"splits": {"many": Split(dp=2, microbatches=2)}}, "6 samples, and .*dp=2.* needs a multiple of 4"),
        ({"splits": {"more": Split(microbatches=7, even=False)}}, "a multiple of 7, or as many at least"),
    ],
)
def test_bad_input_starts_no_rank(changes: dict[str, Any], message: str, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(module, "spawn_ranks", loss_func)
    with pytest.raises(InvalidInputError, match=message):
        check_normalization(loss_func, **{"batch": BATCH, **changes})


def test_a_report_is_a_table() -> None:
    report = NormalizationReport({"DP 2": 1e-7, "nothing": float("nan")})
    assert str(report).splitlines() == [
        "split                   relative difference from the undivided batch",
        "DP 2                    1.0e-07",
        "nothing                 nan",
    ]
    assert not report.same and report.different == ["nothing"]
    assert NormalizationReport({"DP 2": 1e-7}).same
