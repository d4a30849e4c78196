"""The selection of the k most probable tokens, and what holds them; on several ranks, see tests/real."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import TopKDistribution, vocab_parallel_topk
from megatron_rl_patches.losses.logits.distributions import log1mexp
from tests.references.dense import relative_error
from tests.references.dense_topk import dense_log_probs_at
from tests.references.live_bytes import live_bytes

from .test_log_probs import FLOAT32, INF, T, V, random_logits


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
    logits[5, width // 2] = float("nan")
    assert all(len(set(row.tolist())) == k for row in vocab_parallel_topk(logits, k).indices)


def test_ties_across_a_whole_vocabulary() -> None:
    found = vocab_parallel_topk(torch.zeros(2, 50_000), 7)
    assert found.indices.tolist() == [list(range(7))] * 2


def test_there_is_no_graph_and_the_logits_stay() -> None:
    logits = random_logits().requires_grad_()
    before = logits.detach().clone()
    found = vocab_parallel_topk(logits, 3)
    assert not found.log_probs.requires_grad
    assert logits.equal(before)


def test_memory() -> None:
    """Candidates and a few blocks, not the vocabulary."""
    logits = torch.randn(512, 32768)
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

    @pytest.mark.parametrize(
        ("indices", "log_probs", "tail", "message"),
        [
            (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 1), torch.zeros(3), r"\[3, 1\]"),
            (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2), torch.zeros(2), r"tail_log_prob \[2\]"),
            (torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2), torch.zeros(3), "torch.int32"),
            (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2).bfloat16(), torch.zeros(3), "bfloat16"),
            (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2), torch.zeros(3).double(), "float64"),
            (torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2), torch.zeros(1, device="meta"), "meta"),
            (
                torch.zeros(3, 2, dtype=torch.int64),
                torch.zeros(3, 2, requires_grad=True),
                torch.zeros(3),
                "require grad",
            ),
        ],
    )
    def test_refusals(self, indices: Tensor, log_probs: Tensor, tail: Tensor, message: str) -> None:
        with pytest.raises(InvalidInputError, match=message):
            TopKDistribution(indices, log_probs, tail)

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
