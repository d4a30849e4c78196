"""What holds for all logits. Splitting over ranks is in tests/real/test_vocab_parallel_ranks.py."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl_patches.losses import vocab_parallel_log_probs_and_entropy

SEEDS = st.integers(0, 2**31)
ROWS = st.integers(1, 9)
WIDTHS = st.integers(1, 300)
SCALES = st.floats(0, 40)
TEMPERATURES = st.sampled_from([1.0, 0.25, 3.0])


@st.composite
def logits(draw: st.DrawFn, rows: st.SearchStrategy[int] = ROWS) -> Tensor:
    """Float64, so that a property holds to 1e-12."""
    generator = torch.Generator().manual_seed(draw(SEEDS))
    shape = draw(rows), draw(WIDTHS)
    return torch.randn(shape, dtype=torch.float64, generator=generator) * draw(SCALES)


def with_gradient(x: Tensor, targets: Tensor, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    log_probs, entropies = vocab_parallel_log_probs_and_entropy(x, targets, fused=False, **options)
    weights = torch.arange(1.0, len(targets) + 1, dtype=torch.float64)
    (weights * (log_probs + 2 * entropies)).sum().backward()
    assert x.grad is not None
    return log_probs.detach(), entropies.detach(), x.grad


def close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.allclose(*pair, rtol=1e-10, atol=1e-11) for pair in zip(found, expected, strict=True))


def targets_of(x: Tensor) -> Tensor:
    return torch.arange(len(x)) * 7 % x.shape[1]


@settings(max_examples=30)
@given(logits(), SEEDS, TEMPERATURES)
def test_a_constant_per_row_changes_nothing(x: Tensor, seed: int, temperature: float) -> None:
    constant = torch.randn(len(x), 1, generator=torch.Generator().manual_seed(seed)).double() * 100
    shifted = with_gradient(x + constant, targets_of(x), temperature=temperature)
    assert close(shifted, with_gradient(x, targets_of(x), temperature=temperature))


@settings(max_examples=30)
@given(logits(st.just(1)), TEMPERATURES)
def test_probabilities_of_all_tokens_are_one_together(row: Tensor, temperature: float) -> None:
    width = row.shape[1]
    log_probs, _ = vocab_parallel_log_probs_and_entropy(
        row.expand(width, -1), torch.arange(width), temperature=temperature
    )
    assert math.isclose(log_probs.exp().sum().item(), 1.0, rel_tol=1e-12)
    assert (log_probs <= 0).all()


@settings(max_examples=30)
@given(logits(), TEMPERATURES, st.booleans())
def test_the_entropy_lies_between_none_and_that_of_equal_tokens(
    x: Tensor, temperature: float, single: bool
) -> None:
    x = x.float() if single else x
    _, entropies = vocab_parallel_log_probs_and_entropy(x, targets_of(x), temperature=temperature)
    assert (entropies >= 0).all()
    assert (entropies <= math.log(x.shape[1]) * (1 + 1e-6)).all()


@settings(max_examples=30)
@given(logits(), SEEDS, st.booleans())
def test_selecting_rows_is_slicing(x: Tensor, seed: int, kept: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(x), generator=generator)[: seed % (len(x) + 1)]
    mask = torch.rand(len(rows), x.shape[1], generator=generator) < 0.5 if kept else None
    *values, gradient = with_gradient(x, targets_of(x)[rows], rows=rows, keep_mask=mask)
    *sliced, of_sliced = with_gradient(x[rows], targets_of(x)[rows], keep_mask=mask)
    expected = torch.zeros_like(x).index_copy_(0, rows, of_sliced)
    assert close((*values, gradient), (*sliced, expected))


@settings(max_examples=30)
@given(logits(), st.integers(1, 1 << 16), TEMPERATURES)
def test_the_block_size_does_not_change_a_bit(x: Tensor, block_bytes: int, temperature: float) -> None:
    """Megatron pads the vocabulary, so no column is left over from vectors of up to 32."""
    x = x.repeat(1, 32)
    blocks = with_gradient(x, targets_of(x), temperature=temperature, block_bytes=block_bytes)
    whole = with_gradient(x, targets_of(x), temperature=temperature, block_bytes=1 << 30)
    assert all(map(torch.equal, blocks, whole))
