"""Mixtures of teachers, and each sample's own teacher."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import (
    TopKDistribution,
    mix_teachers,
    route_teachers,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)
from tests.references.dense_topk import random_indices

INF = float("inf")


def scored(logits: torch.Tensor, indices: torch.Tensor) -> TopKDistribution:
    return TopKDistribution(indices, *vocab_parallel_log_probs_at(logits, indices, with_tail=True))


@settings(max_examples=30)
@given(
    st.integers(0, 2**31), st.floats(0, 50), st.none() | st.lists(st.floats(1e-3, 10), min_size=3, max_size=3)
)
def test_a_mixture_is_that_of_the_probabilities(seed: int, scale: float, weights: list[float] | None) -> None:
    """For the k entries and for the tail, which is that of the mixed whole distributions."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 4, 20, generator=generator, dtype=torch.float64) * scale
    indices = random_indices(4, 20, 5)
    found = mix_teachers([scored(one, indices) for one in logits], weights)
    shares = torch.tensor(weights or [1.0] * 3, dtype=torch.float64)
    whole = torch.einsum("t,tnv->nv", shares / shares.sum(), logits.softmax(2))
    expected = scored(whole.log(), indices)
    assert found.indices is indices
    assert torch.allclose(found.log_probs.exp(), expected.log_probs.exp(), rtol=1e-9, atol=1e-300)
    assert torch.allclose(found.tail_log_prob.exp(), expected.tail_log_prob.exp(), rtol=1e-9, atol=1e-300)


def test_a_mixture_of_small_probabilities_keeps_them() -> None:
    """Where the probabilities themselves are zero in float32."""
    indices = torch.tensor([[3, 4]])
    teachers = [
        TopKDistribution(indices, torch.tensor([[0.0, low]]), torch.tensor([-INF]))
        for low in (-200.0, -210.0)
    ]
    found = mix_teachers(teachers)
    assert found.log_probs[0].tolist() == pytest.approx([0.0, -200.0 - 0.6931 + 4.54e-5], abs=1e-4)
    assert found.tail_log_prob.tolist() == [-INF]


def test_a_teacher_of_weight_zero_is_not_heard() -> None:
    indices = random_indices(4, 20, 5)
    one, other = (scored(logits, indices) for logits in torch.randn(2, 4, 20))
    found = mix_teachers([one, other], [0.0, 3.0])
    assert torch.allclose(found.log_probs, other.log_probs)
    assert torch.allclose(found.tail_log_prob, other.tail_log_prob)
    of_nan = TopKDistribution(one.indices, one.log_probs * math.nan, one.tail_log_prob * math.nan)
    assert torch.equal(mix_teachers([of_nan, other], [0.0, 3.0]).log_probs, found.log_probs)


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [0.0, 0.0], [float("nan"), 1.0], [INF, 1.0]])
def test_weights_that_are_none(weights: list[float]) -> None:
    teacher = vocab_parallel_topk(torch.randn(4, 20), 5)
    with pytest.raises(InvalidInputError, match="weights are"):
        mix_teachers([teacher, teacher], weights)


def test_different_indices_are_refused_with_the_way_out() -> None:
    with pytest.raises(InvalidInputError, match=r"0 and 1 .* at the same ids.*vocab_parallel_log_probs_at"):
        mix_teachers([vocab_parallel_topk(logits, 5) for logits in torch.randn(2, 4, 20)])
    with pytest.raises(InvalidInputError, match="distributions of teachers are missing"):
        mix_teachers([])


def test_each_sample_gets_what_its_teacher_has() -> None:
    names = ["code", "math", "code"]
    assert route_teachers(names, {"math": [1, 2, 3], "code": ["a", "b", "c"]}) == ["a", 2, "c"]
    assert route_teachers(names, {"math": {1: 2}, "code": ["a", None, "c"], "unused": []}) == ["a", 2, "c"]
    assert route_teachers([], {}) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"math": [1, 2, 3]}, r"\['code'\], expected some of \['math'\]"),
        ({"math": [1, 2, 3], "code": [None, 5, 6]}, "sample 0 names the teacher 'code'"),
        ({"math": [1, 2, 3], "code": [4, 5]}, "sample 2 names the teacher 'code'"),
        ({"math": {}, "code": [4, 5, 6]}, "sample 1 names the teacher 'math'"),
    ],
)
def test_what_is_missing_is_named(values: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        route_teachers(["code", "math", "code"], values)
