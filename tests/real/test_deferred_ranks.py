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
from megatron_rl_patches.testing import spawn_ranks

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


def _teacher(rank: int = 0, size: int = 1) -> tuple[Tensor, Tensor]:
    hidden, weight = _whole(1)
    return hidden, weight.chunk(size)[rank]


def _run(sequence_parallel: bool, frozen: bool, tile_bytes: int | None) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(size)))
    hidden, weight = _whole()
    mine = hidden.chunk(size)[rank].clone() if sequence_parallel else hidden.clone()
    mine.requires_grad_()
    shard = weight.chunk(size)[rank].clone().requires_grad_(not frozen)
    logits = deferred_logits(
        mine, shard, tp_group=group, sequence_parallel=sequence_parallel, tile_bytes=tile_bytes
    )
    teacher = deferred_logits(*_teacher(rank, size), tile_bytes=tile_bytes)
    loss, values = _losses(logits.view(T, -1), teacher.view(T, -1), group)
    loss.backward()  # type: ignore[no-untyped-call]
    return {"values": values, "hidden": mine.grad, "weight": shard.grad}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_equals_one_rank(sequence_parallel: bool, frozen: bool) -> None:
    hidden, weight = (tensor.requires_grad_() for tensor in _whole())
    teacher_hidden, teacher_weight = _teacher()
    loss, expected = _losses(
        (hidden @ weight.T).view(T, V), (teacher_hidden @ teacher_weight.T).view(T, V), None
    )
    loss.backward()  # type: ignore[no-untyped-call]
    ranks = spawn_ranks(_run, 2, sequence_parallel, frozen, 4096)
    for rank in ranks:
        for a, b in zip(expected, rank["values"], strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
    for a, b in zip(ranks[0]["values"], ranks[1]["values"], strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()
    of_hidden = torch.cat([rank["hidden"] for rank in ranks]) if sequence_parallel else ranks[1]["hidden"]
    assert torch.allclose(of_hidden, hidden.grad, rtol=1e-9, atol=1e-12)
    if frozen:
        assert [rank["weight"] for rank in ranks] == [None, None]
    else:
        of_weight = torch.cat([rank["weight"] for rank in ranks])
        assert torch.allclose(of_weight, weight.grad, rtol=1e-9, atol=1e-12)


def _refused() -> str:
    """Both ranks refuse, or the one that calls would wait for the other."""
    group = dist.new_group([0, 1])
    dist.barrier()  # a rank that ends at once would close connections that the other one is still making
    with pytest.raises(InvalidInputError) as refused:
        deferred_logits(torch.zeros(4, 8), torch.zeros(9, 7), tp_group=group, sequence_parallel=True)
    return str(refused.value)


def test_arguments_are_refused_before_the_gather() -> None:
    first, second = spawn_ranks(_refused, 2)
    assert first == second


def _padded_differently() -> list[Tensor]:
    """Return the errors of divergences of a student of 8 rows, 7 of which count, from teachers of others."""
    rank, group = dist.get_rank(), dist.new_group([0, 1])
    hidden = torch.linspace(-1, 2, 6, dtype=torch.float64).view(2, 3)
    weight = torch.linspace(0, 2, 24, dtype=torch.float64).view(8, 3).sin()
    student = deferred_logits(hidden, weight.chunk(2)[rank], tp_group=group)
    errors = []
    for rows in (2, 6, 10):
        num_ids = min(7, rows)
        weight_of_teacher = torch.linspace(1, 2, 3 * rows, dtype=torch.float64).view(rows, 3).sin()
        bias = weight_of_teacher[:, 0]
        head = OutputHead(weight_of_teacher.chunk(2)[rank], bias.chunk(2)[rank])
        (teacher,) = FullDistribution.of(hidden, head.resharded(4, group)).logits()
        value = full_vocabulary_divergence(student, teacher, num_ids=num_ids, tp_group=group)
        whole = hidden @ weight.T, hidden @ weight_of_teacher.T + bias
        log_p, log_q = (logits[:, :num_ids].log_softmax(1) for logits in whole)
        errors.append(value - (log_p.exp() * (log_p - log_q)).sum(1))
    return errors


def test_a_teacher_of_another_padding_takes_the_shards_of_the_student() -> None:
    for errors in spawn_ranks(_padded_differently, 2, timeout=60):
        assert torch.stack(errors).abs().max() < 1e-12
