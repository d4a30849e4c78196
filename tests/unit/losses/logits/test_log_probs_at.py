"""Log-probabilities at given ids and of the tail, on one rank; on several, see tests/real."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_rl_patches.losses import vocab_parallel_log_probs_at
from tests.references.dense import relative_error
from tests.references.dense_topk import dense_log_probs_at, errors, random_indices

from .pairwise import pairwise
from .test_log_probs import FLOAT32, GRADIENT_BOUND, INF, T, V, random_logits

SELECTIONS: dict[str, Any] = {
    "all": None,
    "range": slice(3, 11),
    "strided": slice(1, None, 3),
    "scattered": torch.tensor([12, 0, 5, 7]),
    "none": torch.zeros(0, dtype=torch.int64),
}


CASES = pairwise(
    {
        "rows": list(SELECTIONS.values()),
        "dtype": list(GRADIENT_BOUND),
        "temperature": [1.0, 0.7],
        "inplace_backward": [False, True],
        "block_bytes": [None, 10_000],
    }
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['dtype']}"[6:])
def test_equals_the_dense_formulas(case: dict[str, Any]) -> None:
    rows, dtype = case["rows"], case["dtype"]
    n = len(torch.arange(T)[slice(None) if rows is None else rows])
    indices = random_indices(n, V, 8) if n else torch.zeros(0, 8, dtype=torch.int64)
    options = {name: value for name, value in case.items() if name != "dtype"}
    found = errors(random_logits(dtype=dtype), indices, **options)
    values = GRADIENT_BOUND[torch.float64] if dtype == torch.float64 else FLOAT32
    assert found.log_prob <= values
    assert found.tail <= values
    assert found.gradient <= GRADIENT_BOUND[dtype]


@pytest.mark.parametrize("mass", [1e-1, 1e-3, 1e-5, 1e-7, 1e-9, 1e-30])
def test_a_small_tail_keeps_its_digits(mass: float) -> None:
    """Value and gradient to 5e-6, where ``log(1 - sum(p))`` has no digit left from 1e-7 on."""
    torch.manual_seed(0)
    logits = torch.randn(6, 32768)
    indices = torch.stack([torch.randperm(32768)[:64] for _ in logits])
    probability = torch.log_softmax(logits.double(), 1).gather(1, indices).exp().sum(1, keepdim=True)
    lift = torch.log(probability / (1 - probability) * mass / (1 - mass))
    logits = logits.scatter_add(1, indices, -lift.float().expand(-1, 64).contiguous())

    exact, leaf = logits.double().requires_grad_(), logits.clone().requires_grad_()
    _, expected = dense_log_probs_at(exact, indices)
    assert torch.allclose(expected.exp(), torch.full_like(expected, mass), rtol=1e-3, atol=0)
    _, tail = vocab_parallel_log_probs_at(leaf, indices, with_tail=True)
    expected.sum().backward()
    tail.sum().backward()
    # Of the probability, whose relative error is the absolute one of its logarithm but for what float32
    # can say of the latter; and of each derivative.
    resolution = expected.abs().max().item() * 2**-24
    assert relative_error(tail, expected, torch.ones(())) <= 5e-6 + resolution
    outside = torch.ones_like(logits, dtype=torch.bool).scatter_(1, indices, False)
    assert relative_error(leaf.grad[outside], exact.grad[outside], exact.grad[outside].abs()) <= 5e-6
    scale = exact.grad.abs().amax(1, keepdim=True)
    assert relative_error(leaf.grad, exact.grad, scale) <= 5e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tails_next_to_one_and_of_nothing(dtype: torch.dtype) -> None:
    logits = torch.zeros(1, 32768, dtype=dtype)
    logits[0, :64] = -25.0
    inside = torch.tensor(-25.0, dtype=torch.float64).exp() * 64 / (32768 - 64)
    _, tail = vocab_parallel_log_probs_at(logits, torch.arange(64)[None], with_tail=True)
    assert torch.allclose(tail.double(), -inside.log1p(), rtol=1e-6, atol=0)

    logits = torch.randn(2, 5, dtype=dtype, requires_grad=True)
    indices = torch.tensor([[0, 1, 2, 3, 4], [4, 3, 2, 1, 1]])
    _, tail = vocab_parallel_log_probs_at(logits, indices, with_tail=True)
    assert tail[0] == -INF
    tail.sum().backward()
    assert (logits.grad[0] == 0).all()
    assert logits.grad[1].isfinite().all() and logits.grad[1].abs().sum() > 0


def test_a_mixed_use_of_the_gradients() -> None:
    """Only the ids', only the tail's, and weights of which autograd says nothing are all allowed for."""
    logits, indices = random_logits(5).requires_grad_(), random_indices(5, V, 4)
    log_probs, tail = vocab_parallel_log_probs_at(logits, indices, with_tail=True)
    of_ids, of_tail, of_both = (
        torch.autograd.grad(loss, logits, retain_graph=True)[0]
        for loss in (log_probs[0].sum(), tail.sum(), log_probs[0].sum() + tail.sum())
    )
    assert torch.allclose(of_ids + of_tail, of_both, atol=1e-6)
    assert (of_ids[1:] == 0).all()
