"""Log-probabilities at given ids and of the tail, on one rank; on several, see tests/real."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import vocab_parallel_log_probs_at

from ..live_bytes import live_bytes
from .dense import relative_error
from .dense_topk import NO_ENTRY, dense_log_probs_at, errors, random_indices
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


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_gradcheck(temperature: float) -> None:
    logits = (torch.randn(4, 11, dtype=torch.float64) * 2).requires_grad_()
    indices = torch.tensor([[0, 3, 10], [5, 5, 2], [1, NO_ENTRY, 1], [4, 6, 8]])
    rows = torch.tensor([3, 0, 2])

    def of_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, tail = vocab_parallel_log_probs_at(
            logits, indices[:3], rows=rows, temperature=temperature, with_tail=True
        )
        return log_probs.where(indices[:3] >= 0, 0.0), tail

    assert torch.autograd.gradcheck(of_rows, logits)


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
def test_a_tail_next_to_one_keeps_its_digits(dtype: torch.dtype) -> None:
    logits = torch.zeros(1, 32768, dtype=dtype)
    logits[0, :64] = -25.0
    inside = torch.tensor(-25.0, dtype=torch.float64).exp() * 64 / (32768 - 64)
    _, tail = vocab_parallel_log_probs_at(logits, torch.arange(64)[None], with_tail=True)
    assert torch.allclose(tail.double(), -inside.log1p(), rtol=1e-6, atol=0)


def test_a_tail_without_tokens_has_no_gradient() -> None:
    logits = torch.randn(2, 5, requires_grad=True)
    indices = torch.tensor([[0, 1, 2, 3, 4], [4, 3, 2, 1, 1]])
    _, tail = vocab_parallel_log_probs_at(logits, indices, with_tail=True)
    assert tail[0] == -INF
    tail.sum().backward()
    assert (logits.grad[0] == 0).all()
    assert logits.grad[1].isfinite().all()
    assert logits.grad[1].abs().sum() > 0


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


def test_what_needs_no_gradient_costs_none() -> None:
    logits = random_logits().requires_grad_()
    with torch.no_grad():
        assert not vocab_parallel_log_probs_at(logits, random_indices(T, V, 4)).requires_grad
    assert vocab_parallel_log_probs_at(logits, random_indices(T, V, 4)).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_may_be_changed_in_place(dtype: torch.dtype) -> None:
    logits, indices = random_logits(dtype=dtype).requires_grad_(), random_indices(T, V, 3)
    results = vocab_parallel_log_probs_at(logits, indices, with_tail=True)
    [expected] = torch.autograd.grad(2 * results[0].sum() + results[1].sum(), logits)
    log_probs, tail = vocab_parallel_log_probs_at(logits, indices, with_tail=True)
    log_probs *= 2
    tail += 1
    [gradient] = torch.autograd.grad(log_probs.sum() + tail.sum(), logits)
    assert gradient.equal(expected)


def test_second_derivatives_and_overwritten_logits_are_refused() -> None:
    indices = random_indices(T, V, 4)
    leaf = random_logits().requires_grad_()
    values = vocab_parallel_log_probs_at(leaf, indices, with_tail=True)[1]
    [gradient] = torch.autograd.grad(values.sum(), leaf, create_graph=True)
    with pytest.raises(InvalidInputError, match="differentiated twice"):
        gradient.sum().backward()

    logits = leaf * 1
    values = vocab_parallel_log_probs_at(logits, indices, with_tail=True, inplace_backward=True)[1]
    with pytest.raises(InvalidInputError, match="another inplace_backward"):
        vocab_parallel_log_probs_at(logits, indices, inplace_backward=True)
    [gradient] = torch.autograd.grad(values.sum(), logits, retain_graph=True)
    assert gradient.data_ptr() == logits.data_ptr()
    with pytest.raises(InvalidInputError, match="overwritten"):
        torch.autograd.grad(values.sum(), logits)
    with pytest.raises(InvalidInputError, match="overwritten"):
        vocab_parallel_log_probs_at(logits, indices)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indices": torch.zeros(T, dtype=torch.int64)}, r"expected torch.int64 \[13, K\]"),
        ({"indices": torch.zeros(T, 0, dtype=torch.int64)}, "K at least 1"),
        ({"indices": torch.zeros(T - 1, 2, dtype=torch.int64)}, r"\[12, 2\]"),
        ({"indices": torch.zeros(T, 2)}, "torch.float32"),
        ({"indices": torch.full((T, 2), V)}, f"ids below {V}, or -100 for no entry"),
        ({"indices": torch.full((T, 2), -1)}, "found \\[-1"),
        ({"temperature": 0.0}, "temperature"),
        ({"rows": slice(0, 2)}, r"\[2, K\]"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    options = {"logits": random_logits(), "indices": random_indices(T, V, 3), **changes}
    with pytest.raises(InvalidInputError, match=message):
        vocab_parallel_log_probs_at(**options)


@pytest.mark.parametrize("k", [16, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("shape", "block_bytes"),
    [((256, 16384), 1 << 17), pytest.param((1024, 151936), None, marks=pytest.mark.slow)],
)
def test_memory(shape: tuple[int, int], block_bytes: int | None, k: int) -> None:
    """Of forward and backward beyond the logits, results included."""
    leaf = torch.randn(shape, requires_grad=True)
    indices = torch.randint(shape[1], (shape[0], k), generator=torch.Generator().manual_seed(0))

    def peak(**options: Any) -> float:
        logits = leaf * 1

        def call() -> Tensor:
            log_probs, tail = vocab_parallel_log_probs_at(
                logits, indices, with_tail=True, block_bytes=block_bytes, **options
            )
            return torch.autograd.grad(log_probs.sum() + tail.sum(), logits)[0]

        return live_bytes(call).peak / (leaf.numel() * leaf.element_size())

    assert 1.0 <= peak() <= 1.02
    assert peak(inplace_backward=True) <= 0.02
    assert peak(inplace_backward=True, temperature=0.7) <= 0.02


def test_forward_keeps_a_few_numbers_per_row() -> None:
    logits, k = torch.randn(512, 8192, requires_grad=True), 8
    indices = random_indices(512, 8192, k)
    _, retained = live_bytes(lambda: vocab_parallel_log_probs_at(logits, indices, with_tail=True))
    assert retained <= 512 * (4 * k + 64)
