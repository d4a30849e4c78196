"""Scores of single rows against float64, and what is refused before anything runs."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference.scoring.microbatches import Limits, parse_microbatches
from megatron_rl_patches.inference.scoring.plan import _without_float32_copy

VOCABULARY = 50


def test_outputs_stay_in_their_dtype_where_megatron_allows_it() -> None:
    from megatron.core.transformer.module import Float16Module

    wrapper, inner = torch.nn.Module(), Float16Module.__new__(Float16Module)
    torch.nn.Module.__init__(inner)
    inner.module = torch.nn.Linear(1, 1)
    wrapper.module = inner
    takes_it = "fp32_output" in inspect.signature(Float16Module.forward).parameters
    assert _without_float32_copy(wrapper) == ({"fp32_output": False} if takes_it else {})
    assert _without_float32_copy(torch.nn.Linear(1, 1)) == {}


def microbatch(**changes: Any) -> dict[str, Any]:
    return {"tokens": torch.arange(12).reshape(2, 6), "lengths": [6, 4], **changes}


def check(*microbatches: dict[str, Any], packing: bool = False, **sizes: int) -> Any:
    return parse_microbatches(microbatches, Limits(packing, VOCABULARY, **sizes))


PACKED = {"tokens": torch.arange(8)[None], "lengths": [3, 4], "response_lengths": [1, 2]}


@pytest.mark.parametrize(
    ("batch", "packing", "rows", "targets"),
    [
        (microbatch(), False, [0, 1, 2, 3, 4, 6, 7, 8], [1, 2, 3, 4, 5, 7, 8, 9]),  # all but the first token
        (microbatch(response_lengths=torch.tensor([2, 0])), False, [3, 4], [4, 5]),
        (PACKED, True, [1, 4, 5], [2, 5, 6]),
    ],
)
def test_rows_and_what_they_predict(
    batch: dict[str, Any], packing: bool, rows: list[int], targets: list[int]
) -> None:
    first, second = check(batch, batch, packing=packing)
    assert first.layout.response_rows.tolist() == rows
    assert first.targets_n.tolist() == targets
    assert (first.indices, second.indices) == ([0, 1], [2, 3])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "there is no 'tokens' in it"),
        ({"tokens": torch.zeros(2, 6)}, r"tokens are torch.float32 \[2, 6\]. Expected: an int64 tensor"),
        ({"tokens": [[1, 2]]}, r"tokens are list \[\]. Expected: an int64 tensor"),
        ({"lengths": [7, 4]}, r"lengths \[7, 4\] do not fit tokens of shape \[2, 6\]"),
        ({"lengths": [6, 0]}, r"lengths \[6, 0\] do not fit"),
        ({"lengths": [6]}, r"lengths \[6\] do not fit"),
        ({"tokens": torch.zeros(1, 12, dtype=torch.int64)}, r"lengths \[6, 4\] do not fit"),
        ({"response_lengths": [6, 3]}, "sample 0 has 6 tokens and a response of 6"),
        ({"response_lengths": [1]}, "total_lengths are of 2 samples and response_lengths of 1"),
        ({"indices": [0, 2]}, r"indices \[0, 2\] are no permutation of 0 to 1"),
        ({"indices": [0]}, "there are 1 indices for 2 samples"),
        ({"tokens": torch.full((2, 6), VOCABULARY)}, "token ids are 50 to 50. Expected: 0 to 49"),
        ({"tokens": torch.full((2, 6), -100)}, "token ids are -100 to -100"),
    ],
)
def test_bad_microbatches_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        check(microbatch(**changes))


def test_refusals_say_which_microbatch() -> None:
    with pytest.raises(InvalidInputError, match="microbatch 1: lengths"):
        check(microbatch(), microbatch(lengths=[7, 4]))
    with pytest.raises(InvalidInputError, match="no microbatches"):
        check()
    with pytest.raises(
        InvalidInputError, match=r"multiple of 4 \(tensor-parallel size 4, for sequence parallelism\)"
    ):
        check(microbatch(), sequence_parallel_size=4)
    with pytest.raises(InvalidInputError, match=r"multiple of 8 \(2 × context-parallel size 2 × tensor-par"):
        check(microbatch(), sequence_parallel_size=2, cp_size=2)
