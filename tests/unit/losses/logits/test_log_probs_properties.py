"""What holds for all logits; tests/faults/test_losses.py compares all kinds of them with the formulas."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl_patches.losses import vocab_parallel_log_probs_and_entropy

TEMPERATURES = st.sampled_from([1.0, 0.25, 3.0])


@st.composite
def logits(draw: st.DrawFn) -> Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = draw(st.integers(1, 9)), draw(st.integers(1, 300))
    return torch.randn(shape, dtype=torch.float64, generator=generator) * draw(st.floats(0, 40))


def with_gradient(x: Tensor, targets: Tensor, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    log_probs, entropies = vocab_parallel_log_probs_and_entropy(x, targets, fused=False, **options)
    weights = torch.arange(1.0, len(targets) + 1, dtype=torch.float64)
    (weights * (log_probs + 2 * entropies)).sum().backward()
    assert x.grad is not None
    return log_probs.detach(), entropies.detach(), x.grad


def targets_of(x: Tensor) -> Tensor:
    return torch.arange(len(x)) * 7 % x.shape[1]


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
@given(logits(), st.integers(1, 1 << 16), TEMPERATURES)
def test_the_block_size_does_not_change_a_bit(x: Tensor, block_bytes: int, temperature: float) -> None:
    """Megatron pads the vocabulary, so no column is left over from vectors of up to 32."""
    x = x.repeat(1, 32)
    blocks = with_gradient(x, targets_of(x), temperature=temperature, block_bytes=block_bytes)
    whole = with_gradient(x, targets_of(x), temperature=temperature, block_bytes=1 << 30)
    assert all(map(torch.equal, blocks, whole))
