"""Losses whose backward runs in a thread of autograd, as on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.common.scopes import Scope
from megatron_rl_patches.losses import (
    checkpointed,
    deferred_logits,
    full_vocabulary_divergence,
    vocab_parallel_log_probs_and_entropy,
    vocab_parallel_log_probs_at,
)
from tests.device_thread import device_thread

N, H, V = 6, 4, 64


def log_probs(logits: Tensor, **options: Any) -> Tensor:
    values, entropies = vocab_parallel_log_probs_and_entropy(logits, torch.arange(N), **options)
    return (values - entropies).sum()


def at_ids(logits: Tensor) -> Tensor:
    values, tail = vocab_parallel_log_probs_at(logits, torch.arange(3).expand(N, -1), with_tail=True)
    return values.sum() + tail.sum()


def divergence(logits: Tensor) -> Tensor:
    teacher = torch.randn(N, V, generator=torch.Generator().manual_seed(1))
    return full_vocabulary_divergence(logits, teacher).sum()


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "log-probs": log_probs,
    "in place": partial(log_probs, inplace_backward=True),
    "recomputed": checkpointed(log_probs),
    "at ids": at_ids,
    "divergence": divergence,
    "divergence, recomputed": checkpointed(divergence),
}


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_the_callers_thread(name: str, is_deferred: bool) -> None:
    def gradients() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        leaves = [torch.randn(size, H, generator=generator).requires_grad_() for size in (N, V)]
        logits = deferred_logits(*leaves) if is_deferred else leaves[0] @ leaves[1].T
        return torch.autograd.grad(LOSSES[name](logits), leaves)

    expected = gradients()
    with device_thread():
        results = gradients()
    assert all(map(torch.equal, results, expected))


def test_a_scope_that_backward_would_need_is_noticed() -> None:
    scope: Scope[int] = Scope("test_device_thread")

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * (scope.get() or 0)

    x = torch.ones(1, requires_grad=True)
    with pytest.raises(AssertionError, match="test_device_thread"), device_thread(), scope.enter(2):
        Reads.apply(x).sum().backward()
