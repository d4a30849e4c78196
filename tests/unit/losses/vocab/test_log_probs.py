"""What is peculiar to log-probabilities, tails, entropies and top-k; test_table.py compares with formulas."""

from __future__ import annotations

import pytest
import torch

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import (
    TopKDistribution,
    vocab_parallel_log_probs_and_entropy,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)
from megatron_rl_patches.losses.vocab.arguments import as_slices
from megatron_rl_patches.losses.vocab.softmax import merged
from tests.references.dense import dense_log_probs_at
from tests.references.live_bytes import live_bytes
from tests.references.losses import error, largest
from tests.unit.losses.test_table import FLOAT32, INF, T, V, random_logits


def test_long_runs_of_numbers_are_slices() -> None:
    first, second = torch.arange(3, 40), torch.arange(50, 60)
    assert as_slices(torch.cat([first, second])) == (slice(3, 40), slice(50, 60))
    assert as_slices(first) == slice(3, 40)
    for rows in (torch.cat([second, first]), first[::2], torch.tensor([0, 1, 3, 4, 5, 6, 7, 9])):
        assert as_slices(rows) is rows


def test_equal_parts_are_counted_whatever_the_default_dtype_is() -> None:
    """bfloat16 has no number between 996 and 1000."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        statistics = merged(list(torch.zeros(1000, 2, 1, dtype=torch.float64)), 1.0)
    finally:
        torch.set_default_dtype(default)
    assert statistics.tolist() == [[0.0], [999.0]]


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("margin", "bound"), [(20.0, FLOAT32), (40.0, FLOAT32), (75.0, 2 * FLOAT32)])
def test_next_to_certain(margin: float, bound: float, kept: bool) -> None:
    """Tiny log-probabilities, entropies and gradients keep their digits, where ``1 - p`` has none left."""
    logits = torch.full((2, V), -300.0).index_fill_(1, torch.tensor([7]), margin - 300).requires_grad_()
    keep_mask = torch.ones(2, V, dtype=torch.bool) if kept else None
    values, entropies = vocab_parallel_log_probs_and_entropy(
        logits, torch.tensor([7, 7]), keep_mask=keep_mask, entropy_grad=False
    )
    values.sum().backward()
    rest = torch.tensor(-margin, dtype=torch.float64).exp()
    log_total = ((V - 1) * rest).log1p()
    entropy = log_total + (V - 1) * rest * margin / (1 + (V - 1) * rest)
    assert torch.allclose(values.double(), -log_total, rtol=bound, atol=0)
    assert torch.allclose(entropies.double(), entropy, rtol=bound, atol=0)
    expected = -rest / (1 + (V - 1) * rest) * torch.ones(V, dtype=torch.float64)
    expected[7] *= -(V - 1)
    assert torch.allclose(logits.grad.double(), expected, rtol=bound, atol=0)


# --- top-k, and log-probabilities at ids


@pytest.mark.parametrize(("width", "k"), [(4096, 64), (4097, 64), (4127, 3), (4095, 64), (20, 5)])
def test_wide_rows_whose_largest_values_stand_anywhere(width: int, k: int) -> None:
    """Evenly spread, all together, at the end, equal, and next to a NaN."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, width, generator=generator)
    logits[1, 7 : 7 + k] += 10
    logits[2, -k:] += 10
    logits[3] = logits[3].round()
    logits[4, ::2] = -INF
    assert vocab_parallel_topk(logits, k).indices.equal(largest(logits, k))
    assert vocab_parallel_topk(torch.zeros(2, 50_000), 7).indices.tolist() == [list(range(7))] * 2
    logits[5, width // 2] = float("nan")
    assert all(len(set(row.tolist())) == k for row in vocab_parallel_topk(logits, k).indices)


def test_a_topk_takes_little_memory_and_has_no_graph() -> None:
    """Candidates and a few blocks, not the vocabulary; the logits stay."""
    logits = torch.randn(256, 32768, requires_grad=True)
    before = logits.detach().clone()
    assert not vocab_parallel_topk(logits, 3).log_probs.requires_grad
    assert logits.equal(before)
    assert live_bytes(lambda: vocab_parallel_topk(logits, 64)).peak <= 0.1 * logits.numel() * 4


def test_distributions_are_split_joined_and_selected() -> None:
    whole, other = (vocab_parallel_topk(random_logits(), k) for k in (4, 3))
    parts = whole.split([3, 0, T - 3])
    assert [len(part) for part in parts] == [3, 0, T - 3]
    assert all(map(torch.equal, TopKDistribution.cat(parts).tensors, whole.tensors))
    rows = torch.tensor([5, 1])
    assert whole[rows].indices.equal(whole.indices[rows])
    assert whole[2:4].tail_log_prob.equal(whole.tail_log_prob[2:4])
    assert whole.to("cpu")[whole.tail_log_prob < -INF].k == whole.k == 4
    for distributions in ([whole, other], []):
        with pytest.raises(InvalidInputError, match="of different k, or there are none"):
            TopKDistribution.cat(distributions)


@pytest.mark.parametrize("mass", [1e-1, 1e-5, 1e-7, 1e-30])
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
    assert error(tail, expected, torch.ones(())) <= 5e-6 + resolution
    outside = torch.ones_like(logits, dtype=torch.bool).scatter_(1, indices, False)
    assert error(leaf.grad[outside], exact.grad[outside], exact.grad[outside].abs().clamp(min=1e-6)) <= 5e-6
    assert error(leaf.grad, exact.grad, exact.grad.abs().amax(1, keepdim=True).clamp(min=1e-6)) <= 5e-6


def test_a_tail_next_to_one() -> None:
    logits = torch.zeros(1, 32768).index_fill_(1, torch.arange(64), -25.0)
    inside = torch.tensor(-25.0, dtype=torch.float64).exp() * 64 / (32768 - 64)
    _, tail = vocab_parallel_log_probs_at(logits, torch.arange(64)[None], with_tail=True)
    assert torch.allclose(tail.double(), -inside.log1p(), rtol=1e-6, atol=0)
