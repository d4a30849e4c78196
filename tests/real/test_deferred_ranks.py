"""Deferred logits of an output layer that is split over ranks, with the sequence split too or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import (
    FullDistribution,
    OutputHead,
    deferred_logits,
    full_vocabulary_divergence,
    vocab_parallel_log_probs_and_entropy,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)
from tests.ranks import everywhere, on_ranks

S, B, H, V = 6, 2, 8, 1200
T = S * B
TOKENS = torch.randint(V, (T,), generator=torch.Generator().manual_seed(1))
IDS = torch.randint(V, (T, 4), generator=torch.Generator().manual_seed(2))


def _whole(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(S, B, H, generator=generator, dtype=torch.float64)
    return hidden, torch.randn(V, H, generator=generator, dtype=torch.float64)


def _losses(logits_tv: Tensor, teacher_tv: Tensor, group: Any) -> tuple[Tensor, list[Tensor]]:
    """Return a scalar, and everything that all ranks must have alike."""
    kl = full_vocabulary_divergence(logits_tv, teacher_tv, tp_group=group)
    mixture = [teacher_tv, logits_tv]
    mixed = full_vocabulary_divergence(logits_tv, mixture, divergence="jensen_shannon", tp_group=group)
    short = full_vocabulary_divergence(logits_tv, teacher_tv, num_ids=500, tp_group=group)
    log_probs, entropies = vocab_parallel_log_probs_and_entropy(logits_tv, TOKENS, tp_group=group)
    at, tail = vocab_parallel_log_probs_at(logits_tv, IDS, tp_group=group, with_tail=True)
    topk = vocab_parallel_topk(logits_tv, 7, tp_group=group)
    weights = torch.linspace(-1, 2, T, dtype=torch.float64)
    loss = ((log_probs + 0.3 * entropies + at.sum(1) - tail + kl + mixed - short) * weights).sum()
    values = log_probs, entropies, at, tail, kl, mixed, short, topk.log_probs, topk.indices.double()
    return loss, [v.detach() for v in values]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2, megatron=False)
def test_equals_one_rank(sequence_parallel: bool, frozen: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(size)))
    hidden, weight = (tensor.requires_grad_() for tensor in _whole())
    of_teacher = _whole(1)
    loss, expected = _losses(
        (hidden @ weight.T).view(T, V), (of_teacher[0] @ of_teacher[1].T).view(T, V), None
    )
    loss.backward()

    mine = (hidden.chunk(size)[rank] if sequence_parallel else hidden).detach().clone().requires_grad_()
    shard = weight.detach().chunk(size)[rank].clone().requires_grad_(not frozen)
    logits = deferred_logits(
        mine, shard, tp_group=group, sequence_parallel=sequence_parallel, tile_bytes=4096
    )
    teacher = deferred_logits(of_teacher[0], of_teacher[1].chunk(size)[rank], tile_bytes=4096)
    loss, values = _losses(logits.view(T, -1), teacher.view(T, -1), group)
    loss.backward()
    for a, b in zip(expected, values, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
    first, second = everywhere([value.numpy().tobytes() for value in values])
    assert first == second
    of_hidden = hidden.grad.chunk(size)[rank] if sequence_parallel else hidden.grad
    assert torch.allclose(mine.grad, of_hidden, rtol=1e-9, atol=1e-12)
    if frozen:
        assert shard.grad is None
    else:
        assert torch.allclose(shard.grad, weight.grad.chunk(size)[rank], rtol=1e-9, atol=1e-12)


@on_ranks(2, megatron=False)
def test_arguments_are_refused_before_the_gather() -> None:
    """Both ranks refuse, or the one that calls would wait for the other."""
    dist.barrier()  # a rank that ends at once would close connections that the other one is still making
    with pytest.raises(InvalidInputError, match=r"weight \[9, 7\]"):
        deferred_logits(
            torch.zeros(4, 8), torch.zeros(9, 7), tp_group=dist.group.WORLD, sequence_parallel=True
        )


@on_ranks(2, megatron=False, timeout=60)
def test_a_teacher_of_another_padding_takes_the_shards_of_the_student() -> None:
    """The student has 8 rows, 7 of which count."""
    rank, group = dist.get_rank(), dist.new_group([0, 1])
    hidden = torch.linspace(-1, 2, 6, dtype=torch.float64).view(2, 3)
    weight = torch.linspace(0, 2, 24, dtype=torch.float64).view(8, 3).sin()
    student = deferred_logits(hidden, weight.chunk(2)[rank], tp_group=group)
    for rows in (2, 6, 10):
        num_ids = min(7, rows)
        weight_of_teacher = torch.linspace(1, 2, 3 * rows, dtype=torch.float64).view(rows, 3).sin()
        bias = weight_of_teacher[:, 0]
        head = OutputHead(weight_of_teacher.chunk(2)[rank], bias.chunk(2)[rank])
        (teacher,) = FullDistribution.from_hidden(hidden, head.resharded(4, group)).logits()
        value = full_vocabulary_divergence(student, teacher, num_ids=num_ids, tp_group=group)
        whole = hidden @ weight.T, hidden @ weight_of_teacher.T + bias
        log_p, log_q = (logits[:, :num_ids].log_softmax(1) for logits in whole)
        assert (value - (log_p.exp() * (log_p - log_q)).sum(1)).abs().max() < 1e-12
