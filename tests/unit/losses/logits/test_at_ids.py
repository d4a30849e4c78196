"""The most probable tokens, log-probabilities at given ids, and of all others together, on one rank.

On several ranks, see tests/real.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import TopKDistribution, vocab_parallel_log_probs_at, vocab_parallel_topk
from megatron_rl_patches.losses.logits.distributions import log1mexp
from tests.references.dense import relative_error
from tests.references.dense_topk import dense_log_probs_at, errors, random_indices
from tests.references.live_bytes import live_bytes

from .pairwise import pairwise
from .test_log_probs import FLOAT32, GRADIENT_BOUND, INF, SELECTIONS, T, V, random_logits


def expected_indices(logits: Tensor, k: int) -> Tensor:
    return logits.sort(dim=1, descending=True, stable=True).indices[:, :k]


@pytest.mark.parametrize(
    ("k", "dtype", "temperature"),
    [
        (1, torch.float32, 0.5),
        (5, torch.float64, 1.0),
        (5, torch.bfloat16, 0.5),
        (64, torch.float32, 1.0),
        (V, torch.float32, 0.5),
        (V, torch.bfloat16, 1.0),
    ],
)
def test_equals_the_dense_formulas(k: int, dtype: torch.dtype, temperature: float) -> None:
    logits = random_logits(dtype=dtype)
    for rows in (None, slice(2, 9), torch.tensor([11, 3, 4])):
        found = vocab_parallel_topk(logits, k, temperature=temperature, rows=rows, block_bytes=20_000)
        assert found.indices.equal(expected_indices(logits if rows is None else logits[rows], k))
        log_probs, tail = dense_log_probs_at(logits, found.indices, rows, temperature)
        bound = 1e-9 if dtype == torch.float64 else FLOAT32
        assert relative_error(found.log_probs, log_probs, log_probs.abs()) <= bound
        if k < V:
            assert relative_error(found.tail_log_prob, tail, tail.abs()) <= bound
        else:
            assert (found.tail_log_prob == -INF).all()


@pytest.mark.parametrize(("width", "k"), [(4096, 64), (4097, 64), (4127, 3), (4095, 64), (20, 5)])
def test_wide_rows_whose_largest_values_stand_anywhere(width: int, k: int) -> None:
    """Evenly spread, all together, at the end, equal, and next to a NaN."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, width, generator=generator)
    logits[1, 7 : 7 + k] += 10
    logits[2, -k:] += 10
    logits[3] = logits[3].round()
    logits[4, ::2] = -INF
    found = vocab_parallel_topk(logits, k)
    assert found.indices.equal(expected_indices(logits, k))
    assert vocab_parallel_topk(torch.zeros(2, 50_000), 7).indices.tolist() == [list(range(7))] * 2
    logits[5, width // 2] = float("nan")
    assert all(len(set(row.tolist())) == k for row in vocab_parallel_topk(logits, k).indices)


def test_memory_and_no_graph() -> None:
    """Candidates and a few blocks, not the vocabulary; the logits stay."""
    logits = torch.randn(512, 32768, requires_grad=True)
    before = logits.detach().clone()
    assert not vocab_parallel_topk(logits, 3).log_probs.requires_grad
    assert logits.equal(before)
    assert live_bytes(lambda: vocab_parallel_topk(logits, 64)).peak <= 0.1 * logits.numel() * 4


class TestDistribution:
    def test_split_and_cat_are_opposites(self) -> None:
        whole = vocab_parallel_topk(random_logits(), 4)
        parts = whole.split([3, 0, T - 3])
        assert [len(part) for part in parts] == [3, 0, T - 3]
        again = TopKDistribution.cat(parts)
        assert again.k == whole.k == 4
        for name in ("indices", "log_probs", "tail_log_prob"):
            assert getattr(again, name).equal(getattr(whole, name))

    def test_tokens_are_selected(self) -> None:
        whole = vocab_parallel_topk(random_logits(), 4)
        rows = torch.tensor([5, 1])
        assert whole[rows].indices.equal(whole.indices[rows])
        assert whole[2:4].tail_log_prob.equal(whole.tail_log_prob[2:4])
        assert whole.to("cpu")[whole.tail_log_prob < -INF].k == 4

    def test_different_k_are_not_put_together(self) -> None:
        both = [vocab_parallel_topk(random_logits(), k) for k in (3, 4)]
        for distributions in (both, []):
            with pytest.raises(InvalidInputError, match="of different k"):
                TopKDistribution.cat(distributions)


class TestLog1mexp:
    def test_equals_the_formula(self) -> None:
        x = -torch.logspace(-12, 2, 200, dtype=torch.float64).requires_grad_()
        found = log1mexp(x)
        expected = torch.where(x > -0.1, (-torch.special.expm1(x)).log(), torch.log1p(-x.exp()))
        assert torch.allclose(found, expected, rtol=1e-12)
        assert torch.autograd.gradcheck(log1mexp, -torch.linspace(0.1, 5, 9).double().requires_grad_())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_a_lost_tail_has_no_gradient(self, dtype: torch.dtype) -> None:
        x = torch.tensor([0.0, 1e-7, -1e-45, -INF, -1.0], dtype=dtype, requires_grad=True)
        found = log1mexp(x)
        assert (found[:2] == -INF).all()
        assert found[3] == 0
        [gradient] = torch.autograd.grad(found[:2].sum() + found[3:].sum(), x)
        assert (gradient[[0, 1, 3]] == 0).all()
        assert gradient[4] == pytest.approx(-1 / (torch.tensor(1.0).exp() - 1))
        assert log1mexp(x).sum().backward() is None
        assert x.grad.isfinite().all()


CASES: dict[str, Sequence[Any]] = {
    "rows": list(SELECTIONS.values()),
    "dtype": list(GRADIENT_BOUND),
    "temperature": [1.0, 0.7],
    "inplace_backward": [False, True],
    "block_bytes": [None, 10_000],
}


@pytest.mark.parametrize("case", pairwise(CASES), ids=lambda case: f"{case['dtype']}"[6:])
def test_log_probs_at_ids_equal_the_dense_formulas(case: dict[str, Any]) -> None:
    rows, dtype = case["rows"], case["dtype"]
    n = len(torch.arange(T)[slice(None) if rows is None else rows])
    indices = random_indices(n, V, 8) if n else torch.zeros(0, 8, dtype=torch.int64)
    options = {name: value for name, value in case.items() if name != "dtype"}
    found = errors(random_logits(dtype=dtype), indices, **options)
    bound = GRADIENT_BOUND[torch.float64] if dtype == torch.float64 else FLOAT32
    assert max(found.log_prob, found.tail) <= bound
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
