"""Top-k over real tensor-parallel ranks (gloo): values, gradients, bytes sent; distillation over CP ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_patches.losses import (
    DistillationBatch,
    DistillationOptions,
    SequenceLayout,
    make_distillation_loss_func,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)
from tests.ranks import everywhere, on_ranks
from tests.real.test_vocab_parallel_ranks import mine
from tests.references.dense import relative_error
from tests.references.dense_topk import dense_log_probs_at, errors, has_no_softmax, random_indices
from tests.references.sent_bytes import sent_bytes
from tests.unit.losses.logits.test_log_probs import EXTREMES, random_logits

T, V, K = 11, 1004, 8
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "inplace_backward": True},
    {"rows": slice(2, 9)},
    {"rows": torch.tensor([7, 3, 10, 0]), "inplace_backward": True, "block_bytes": 3000},
)


@pytest.mark.parametrize("tp_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks(lambda tp_size: tp_size, megatron=False)
def test_ranks(tp_size: int) -> None:
    group = dist.new_group(list(range(tp_size)))
    check_selection(group)
    check_ties(group)
    check_no_rows(group)
    check_extremes(group)
    check_poisons(group)
    values = check_log_probs(group) + check_bytes(group)
    # All ranks have the same bits.
    assert len(set(everywhere(b"".join(value.numpy().tobytes() for value in values)))) == 1
    with sent_bytes() as calls:
        alone, _ = dist.new_subgroups(1)
        errors(random_logits(T, V), random_indices(T, V, K), tp_group=alone)
        vocab_parallel_topk(random_logits(T, V), K, tp_group=alone)
    assert calls == [], "of a group of one rank"


def check_selection(group: dist.ProcessGroup) -> None:
    """Also of more than one rank has, and of everything."""
    for dtype, bound in ((torch.float32, 2e-6), (torch.float64, 1e-9), (torch.bfloat16, 2e-6)):
        logits = random_logits(T, V, dtype)
        for k in (1, K, V // group.size() + 3, V):
            k = min(k, V)
            found = vocab_parallel_topk(
                logits[:, mine(group)], k, tp_group=group, temperature=0.7, rows=slice(1, T)
            )
            expected = logits[1:].sort(dim=1, descending=True, stable=True).indices[:, :k]
            assert found.indices.equal(expected)
            log_probs, tail = dense_log_probs_at(logits, expected, slice(1, T), 0.7)
            assert relative_error(found.log_probs, log_probs, log_probs.abs()) <= bound
            assert k == V or relative_error(found.tail_log_prob, tail, tail.abs()) <= bound
            assert k < V or found.tail_log_prob.isneginf().all()


def check_ties(group: dist.ProcessGroup) -> None:
    """Of equal logits the lowest ids, wherever the borders are."""
    generator = torch.Generator().manual_seed(0)
    for columns in (2, 6, 40):
        logits = torch.randint(3, (20, columns * group.size()), generator=generator).float()
        logits[::4, : columns + 1] = -float("inf")
        for k in (1, 3, columns, columns + 1, columns * group.size()):
            k = min(k, logits.shape[1])
            found = vocab_parallel_topk(logits[:, mine(group, logits.shape[1])], k, tp_group=group)
            assert found.indices.equal(logits.sort(dim=1, descending=True, stable=True).indices[:, :k])


def check_log_probs(group: dist.ProcessGroup) -> list[Tensor]:
    """Against the dense formulas, gradients too: the whole derivative by the logits of this rank."""
    values = []
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 5e-3)):
        for options in OPTIONS:
            n = len(torch.arange(T)[options.get("rows", slice(None))])
            # Ids on each rank, on its borders, and rows of which a rank has none.
            indices = random_indices(n, V, K)
            indices[-1] = torch.arange(K)
            logits = random_logits(T, V, dtype)
            found = errors(logits, indices, columns=mine(group), tp_group=group, **options)
            assert found.log_prob <= min(bound, 2e-6), (found, options)
            assert found.tail <= (1e-9 if dtype == torch.float64 else 2e-6), (found, options)
            assert found.gradient <= bound, (found, options)
            part = logits[:, mine(group)].clone()
            values += vocab_parallel_log_probs_at(
                part, indices, tp_group=group, with_tail=True, **{**options, "inplace_backward": False}
            )
            found_topk = vocab_parallel_topk(part, K, tp_group=group)
            values += [found_topk.indices, found_topk.log_probs, found_topk.tail_log_prob]
    return values


def check_extremes(group: dist.ProcessGroup) -> None:
    """On some ranks no column may count at all, or the tail be on one rank alone."""
    for logits in (whole[:, :1000] for whole in EXTREMES.values()):
        indices = torch.tensor([[7, 0, 7], [6, 999, 2], [5, -100, 4], [-100] * 3])
        leaf = logits[:, mine(group, 1000)].clone().requires_grad_()
        log_probs, tail = vocab_parallel_log_probs_at(leaf, indices, tp_group=group, with_tail=True)
        expected = dense_log_probs_at(logits, indices)
        for values, reference in zip((log_probs, tail), expected, strict=True):
            assert torch.allclose(values.double(), reference, rtol=2e-6, atol=1e-6)
        sum(values[values > -float("inf")].sum() for values in (log_probs, tail)).backward()
        assert leaf.grad.isfinite().all()
    everything = torch.arange(12 // group.size() * group.size())
    leaf = torch.zeros(1, len(everything) // group.size(), requires_grad=True)
    _, tail = vocab_parallel_log_probs_at(leaf, everything[None], tp_group=group, with_tail=True)
    assert tail.item() == -float("inf")
    tail.sum().backward()
    assert (leaf.grad == 0).all()


def check_poisons(group: dist.ProcessGroup) -> None:
    """What is NaN or infinite on one rank spoils its row on all of them, and no other row."""
    indices = random_indices(T, V, K)
    for value in (float("nan"), float("inf")):
        logits = random_logits(T, V)
        logits[2, 5] = logits[7, V - 2] = value
        part, fine = logits[:, mine(group)], ~has_no_softmax(logits)
        found = vocab_parallel_topk(part, K, tp_group=group)
        assert found.indices[fine].equal(
            logits[fine].sort(dim=1, descending=True, stable=True).indices[:, :K]
        )
        for ids, values in (
            (found.indices, (found.log_probs, found.tail_log_prob)),
            (indices, vocab_parallel_log_probs_at(part, indices, tp_group=group, with_tail=True)),
        ):
            for one, reference in zip(values, dense_log_probs_at(logits, ids), strict=True):
                assert torch.allclose(one.double(), reference, rtol=2e-6, atol=1e-6, equal_nan=True)


def check_no_rows(group: dist.ProcessGroup) -> None:
    """Empty calls take part as well."""
    logits, nothing = random_logits(T, V)[:, mine(group)], torch.zeros(0, dtype=torch.int64)
    with sent_bytes() as calls:
        leaf = logits.clone().requires_grad_()
        found = vocab_parallel_log_probs_at(leaf, nothing.view(0, K), tp_group=group, rows=nothing)
        found.sum().backward()
        assert found.shape == (0, K)
        assert (leaf.grad == 0).all()
        assert len(vocab_parallel_topk(logits, K, tp_group=group, rows=nothing)) == 0
    assert len(calls) == 2


def check_bytes(group: dist.ProcessGroup) -> list[Tensor]:
    """One collective in forward and none in backward, of what belongs to the ids alone."""
    logits = torch.randn(64, V, generator=torch.Generator().manual_seed(0))[:, mine(group)]
    indices = random_indices(64, V, 16)
    leaf = logits.clone().requires_grad_()
    with sent_bytes() as sent:
        found = vocab_parallel_topk(logits, 16, tp_group=group)
        log_probs, tail = vocab_parallel_log_probs_at(leaf, indices, tp_group=group, with_tail=True)
        (log_probs.sum(-1) + tail)[found.tail_log_prob < 0].nan_to_num(neginf=0.0).sum().backward()
    # In all, a rank sends eight bytes more, what its logits have been divided by.
    assert sent == [
        ("all_gather_into_tensor", 64 * (8 * 16 + 8) + 8),
        ("all_reduce", 64 * (4 * 16 + 8 * group.size()) + 8 * group.size()),
    ]
    return [found.indices, found.log_probs, found.tail_log_prob, log_probs.detach(), tail.detach()]


@on_ranks(2, megatron=False)
def test_distillation_over_context_parallel_ranks() -> None:
    """Every rank has the whole loss, and of its own rows the gradient of all ranks' losses together."""
    totals, responses = [9, 4, 21, 2], [5, 0, 20, 1]
    generator = torch.Generator().manual_seed(0)
    teacher = vocab_parallel_topk(torch.randn(sum(responses), 30, generator=generator).double(), 5)
    masks = [torch.rand(n, generator=generator) < 0.8 for n in responses]
    batch = DistillationBatch([teacher.split(responses)], masks)
    # By response token; on the ranks they lie elsewhere.
    rows = torch.randn(sum(responses), 30, generator=generator).double()
    group = dist.group.WORLD
    whole = SequenceLayout.build(totals, responses)
    split = SequenceLayout.build(totals, responses, cp_rank=group.rank(), cp_size=2)
    for options in (
        DistillationOptions(),
        DistillationOptions(divergence="forward_kl", normalization="sequence"),
    ):
        results = []
        for layout, cp_group in ((whole, None), (split, group)):
            logits = torch.zeros(1, layout.num_rows, 30, dtype=torch.float64)
            logits[0, layout.response_rows] = rows[layout.response_index]
            logits.requires_grad_()
            loss_func = make_distillation_loss_func(layout, batch, options, cp_group=cp_group)
            loss, count, metrics = loss_func(logits)
            loss.backward()
            results.append((loss.detach(), count, metrics, logits.grad[0, layout.response_rows]))
        (*alone, gradient), (*over_ranks, gradient_cp) = results
        torch.testing.assert_close(over_ranks, alone)
        torch.testing.assert_close(gradient_cp, gradient[split.response_index] * 2)
