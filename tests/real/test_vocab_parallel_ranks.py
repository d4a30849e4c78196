"""Logits split over real tensor-parallel ranks (gloo): values, gradients, bytes sent, refusals.

Random programs, in ``tests/faults``, have other losses and context parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_patches import losses
from megatron_rl_patches.errors import InvalidInputError
from tests.ranks import everywhere, on_ranks
from tests.references import dense_topk
from tests.references.dense import IGNORE, errors, relative_error
from tests.references.dense_topk import dense_log_probs_at, random_indices
from tests.references.sent_bytes import sent_bytes
from tests.unit.losses.logits.test_log_probs import (
    EXTREMES,
    FLOAT32,
    GRADIENT_BOUND,
    INF,
    random_logits,
    random_targets,
)

T, V, K = 11, 1004, 8
KEEP = torch.rand(T, V, generator=torch.Generator().manual_seed(2)) < 0.2
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "inplace_backward": True},
    {"keep_mask": KEEP, "temperature": 1.3},
    {"rows": slice(2, 9), "entropy_grad": False},
    {"rows": torch.tensor([7, 3, 10, 0]), "keep_mask": KEEP[:4], "inplace_backward": True},
)


@pytest.mark.parametrize("tp_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks(lambda tp_size: tp_size, megatron=False)
def test_ranks(tp_size: int) -> None:
    group = dist.new_group(list(range(tp_size)))
    for check_these in CHECKS:
        check_these(group)
    values = check_collectives(group) + check_bytes(group)
    # All ranks have the same bits.
    assert len(set(everywhere(b"".join(value.numpy().tobytes() for value in values)))) == 1
    with sent_bytes() as calls:
        alone, _ = dist.new_subgroups(1)
        check(random_logits(T, V), random_targets(T, V), alone)
        check_at(random_logits(T, V), random_indices(T, V, K), alone)
        losses.vocab_parallel_topk(random_logits(T, V), K, tp_group=alone)
    assert calls == [], "of a group of one rank"


def mine(group: dist.ProcessGroup, columns: int = V) -> slice:
    width, rank = columns // group.size(), group.rank()
    return slice(rank * width, (rank + 1) * width)


def at_borders(rows: int, group: dist.ProcessGroup, columns: int = V) -> Tensor:
    """First and last column of each rank, then any; and one that is ignored."""
    starts = torch.arange(0, columns, columns // group.size())
    borders = torch.cat([starts, starts + columns // group.size() - 1])
    targets = torch.cat([borders, random_targets(rows, columns)])[:rows]
    targets[rows // 2] = IGNORE
    return targets


def check(logits: Tensor, targets: Tensor, group: dist.ProcessGroup, **options: Any) -> None:
    columns = mine(group, logits.shape[1])
    found = errors(logits, targets, tp_group=group, columns=columns, fused=False, **options)
    bound = 1e-9 if logits.dtype == torch.float64 else FLOAT32
    assert found.log_prob <= bound, (found, options)
    assert found.entropy <= bound, (found, options)
    assert found.gradient <= GRADIENT_BOUND[logits.dtype], (found, options)


def check_at(logits: Tensor, indices: Tensor, group: dist.ProcessGroup, **options: Any) -> None:
    """The gradient is the whole derivative by the logits of this rank."""
    found = dense_topk.errors(
        logits, indices, columns=mine(group, logits.shape[1]), tp_group=group, **options
    )
    is_double = logits.dtype == torch.float64
    assert found.log_prob <= (1e-10 if is_double else FLOAT32), (found, options)
    assert found.tail <= (1e-9 if is_double else FLOAT32), (found, options)
    assert found.gradient <= (1e-10 if is_double else GRADIENT_BOUND[logits.dtype]), (found, options)


def check_dense(group: dist.ProcessGroup) -> None:
    for dtype, options in product(GRADIENT_BOUND, OPTIONS):
        logits = random_logits(T, V, dtype)
        n = len(torch.arange(T)[options.get("rows", slice(None))])
        check(logits, at_borders(n, group), group, **options)
        # Ids on each rank, on its borders, and rows of which a rank has none.
        indices = random_indices(n, V, K)
        indices[-1] = torch.arange(K)
        options = {name: options[name] for name in options if name not in ("keep_mask", "entropy_grad")}
        check_at(logits, indices, group, block_bytes=3000 if "rows" in options else None, **options)


def check_extremes(group: dist.ProcessGroup) -> None:
    """On some ranks no column may count at all, or only ones with probability zero."""
    for logits in EXTREMES.values():
        for keep_mask in (None, torch.zeros(4, 1000, dtype=torch.bool)):
            check(logits[:, :1000], torch.tensor([7, 7, IGNORE, 7]), group, keep_mask=keep_mask)
        # The tail may be on one rank alone.
        indices = torch.tensor([[7, 0, 7], [6, 999, 2], [5, -100, 4], [-100] * 3])
        leaf = logits[:, mine(group, 1000)].clone().requires_grad_()
        of_ids = losses.vocab_parallel_log_probs_at(leaf, indices, tp_group=group, with_tail=True)
        assert_close(of_ids, dense_log_probs_at(logits[:, :1000], indices))
        sum(values[values > -INF].sum() for values in of_ids).backward()
        assert leaf.grad.isfinite().all()
    elsewhere = random_logits(4, V)
    elsewhere[:, : V // 2] = -INF
    check(elsewhere, torch.full((4,), V - 1), group)
    everything = torch.arange(12 // group.size() * group.size())
    leaf = torch.zeros(1, len(everything) // group.size(), requires_grad=True)
    _, tail = losses.vocab_parallel_log_probs_at(leaf, everything[None], tp_group=group, with_tail=True)
    assert tail.item() == -INF
    tail.sum().backward()
    assert (leaf.grad == 0).all()
    # The largest logit is on every rank, which may have a single column.
    for columns in (group.size(), 2 * group.size()):
        targets = torch.tensor([0, 1, columns - 1, IGNORE]).clamp(max=columns - 1)
        check(torch.zeros(4, columns), targets, group)


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for values, reference in zip(found, expected, strict=True):
        assert torch.allclose(values.double(), reference, rtol=2e-6, atol=1e-6, equal_nan=True)


def largest(logits: Tensor, k: int) -> Tensor:
    """Return the ids of the k largest logits, of equal ones the lowest ids."""
    return logits.sort(dim=1, descending=True, stable=True).indices[:, :k]


def check_poisons(group: dist.ProcessGroup) -> None:
    """What is NaN or infinite on one rank spoils its row on all of them, and no other row."""
    not_finite = torch.arange(T) % 5 == 3
    for value in (float("nan"), float("inf")):
        for column in (5, V - 2):
            logits = random_logits(T, V)
            logits[not_finite, column] = value
            part = logits[:, mine(group)].clone().requires_grad_()
            found = losses.vocab_parallel_log_probs_and_entropy(
                part, torch.arange(T), tp_group=group, fused=False
            )
            sum(values.sum() for values in found).backward()
            for values in (*found, part.grad.sum(1)):
                assert torch.equal(values.isnan(), not_finite)
            indices = random_indices(T, V, K)
            at_ids = losses.vocab_parallel_log_probs_at(part, indices, tp_group=group, with_tail=True)
            assert_close(at_ids, dense_log_probs_at(logits, indices))
            topk = losses.vocab_parallel_topk(part, K, tp_group=group)
            assert topk.indices[~not_finite].equal(largest(logits, K)[~not_finite])
            expected = dense_log_probs_at(logits, topk.indices)
            assert_close((topk.log_probs, topk.tail_log_prob), expected)


def check_no_rows(group: dist.ProcessGroup) -> None:
    """Empty calls take part as well."""
    nothing = torch.zeros(0, dtype=torch.int64)
    with sent_bytes() as calls:
        check(torch.zeros(0, V), nothing, group)
        check(random_logits(T, V), nothing, group, rows=nothing)
        check_at(random_logits(T, V), nothing.view(0, K), group, rows=nothing)
        logits = random_logits(T, V)[:, mine(group)]
        assert len(losses.vocab_parallel_topk(logits, K, tp_group=group, rows=nothing)) == 0
    assert len(calls) == 4


def check_refusals(group: dist.ProcessGroup) -> None:
    """Bad arguments are rejected on each rank, before any of them waits for the others."""
    logits, targets = random_logits(T, V)[:, mine(group)], random_targets(T, V)
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"targets": targets + V}, f"ids below {V}"),
        ({"targets": targets[:-1]}, r"expected torch.int64 \[11\]"),
        ({"keep_mask": KEEP[:, :-4]}, "expected torch.bool"),
        ({"logits": logits[None]}, "vocab / tp"),
    )
    others = dist.new_group([group.size() - 1])
    with sent_bytes() as calls:
        for changes, message in wrong:
            arguments = {"logits": logits, "targets": targets, "tp_group": group, **changes}
            with pytest.raises(InvalidInputError, match=message):
                losses.vocab_parallel_log_probs(**arguments)
        if group.rank() == 0:
            with pytest.raises(InvalidInputError, match="not in tp_group"):
                losses.vocab_parallel_log_probs(logits, targets, tp_group=others)
        with pytest.raises(InvalidInputError, match=r"weight \[9, 7\]"):  # before the sequence is gathered
            losses.deferred_logits(
                torch.zeros(4, 8), torch.zeros(9, 7), tp_group=group, sequence_parallel=True
            )
    assert calls == []


def check_refused_on_one_rank(group: dist.ProcessGroup) -> None:
    """Each rank judges its own logits by ``inplace_backward``: where one cannot overwrite them, all raise."""
    whole = random_logits(2 * T, V)[:, mine(group)].contiguous().requires_grad_()
    indices = random_targets(T, V)[:, None]
    for refusing, message in (({0}, "a part of something larger"), ({group.size() - 1}, "leaf")):
        for rows in (None, slice(0, 0)):
            logits = whole[:T] * 1
            if group.rank() in refusing:
                logits = (whole * 1)[:T] if "part" in message else logits.detach().requires_grad_()
            targets = random_targets(T, V)[slice(None) if rows is None else rows]
            expected = rf"{message}.*of ranks {min(refusing)} of tp_group"
            with sent_bytes() as calls:
                with pytest.raises(InvalidInputError, match=expected):
                    losses.vocab_parallel_log_probs(
                        logits, targets, tp_group=group, rows=rows, inplace_backward=True
                    )
                with pytest.raises(InvalidInputError, match=expected):
                    losses.vocab_parallel_log_probs_at(logits, indices, tp_group=group, inplace_backward=True)
            assert [name for name, _ in calls] == ["all_gather_into_tensor", "all_reduce"]


def check_collectives(group: dist.ProcessGroup) -> list[Tensor]:
    """One all-gather forward, none backward; in every mode."""
    values: list[Tensor] = []
    columns = mine(group)
    for options in map(dict, OPTIONS):
        if "keep_mask" in options:
            options["keep_mask"] = options["keep_mask"][:, columns]
        n = len(torch.arange(T)[options.get("rows", slice(None))])
        logits = random_logits(T, V)[:, columns].clone().requires_grad_() * 1
        targets = at_borders(n, group)
        with sent_bytes() as calls:
            found = losses.vocab_parallel_log_probs_and_entropy(logits, targets, tp_group=group, **options)
            sum(one.sum() for one in found if one.requires_grad).backward()
            options.pop("entropy_grad", None)
            logits = random_logits(T, V)[:, columns].clone()
            alone = losses.vocab_parallel_log_probs(logits, targets, tp_group=group, **options)
        assert [name for name, _ in calls] == ["all_gather_into_tensor"] * 2
        of_ids: Any = {name: options[name] for name in options if name in ("rows", "temperature")}
        indices = random_indices(n, V, K)
        at_ids = losses.vocab_parallel_log_probs_at(logits, indices, tp_group=group, with_tail=True, **of_ids)
        values += [one.detach() for one in (*found, alone, *at_ids)]
    return values


def check_selection(group: dist.ProcessGroup) -> None:
    """Also of more than one rank has, and of everything; of equal logits the lowest ids."""
    for dtype, bound in ((torch.float32, 2e-6), (torch.float64, 1e-9), (torch.bfloat16, 2e-6)):
        logits = random_logits(T, V, dtype)
        for k in (1, K, V // group.size() + 3, V):
            found = losses.vocab_parallel_topk(
                logits[:, mine(group)], k, tp_group=group, temperature=0.7, rows=slice(1, T)
            )
            expected = largest(logits[1:], k)
            assert found.indices.equal(expected)
            log_probs, tail = dense_log_probs_at(logits, expected, slice(1, T), 0.7)
            assert relative_error(found.log_probs, log_probs, log_probs.abs()) <= bound
            assert k == V or relative_error(found.tail_log_prob, tail, tail.abs()) <= bound
            assert k < V or found.tail_log_prob.isneginf().all()
    generator = torch.Generator().manual_seed(0)
    for columns in (2, 6, 40):
        logits = torch.randint(3, (20, columns * group.size()), generator=generator).float()
        logits[::4, : columns + 1] = -INF
        for k in (1, 3, columns, columns + 1, columns * group.size()):
            k = min(k, logits.shape[1])
            found = losses.vocab_parallel_topk(logits[:, mine(group, logits.shape[1])], k, tp_group=group)
            assert found.indices.equal(largest(logits, k))


def check_bytes(group: dist.ProcessGroup) -> list[Tensor]:
    """One collective in forward and none in backward, of what belongs to the ids alone."""
    logits = torch.randn(64, V, generator=torch.Generator().manual_seed(0))[:, mine(group)]
    indices = random_indices(64, V, 16)
    leaf = logits.clone().requires_grad_()
    with sent_bytes() as sent:
        found = losses.vocab_parallel_topk(logits, 16, tp_group=group)
        log_probs, tail = losses.vocab_parallel_log_probs_at(leaf, indices, tp_group=group, with_tail=True)
        (log_probs.sum(-1) + tail)[found.tail_log_prob < 0].nan_to_num(neginf=0.0).sum().backward()
    # In all, a rank sends eight bytes more, what its logits have been divided by.
    assert sent == [
        ("all_gather_into_tensor", 64 * (8 * 16 + 8) + 8),
        ("all_reduce", 64 * (4 * 16 + 8 * group.size()) + 8 * group.size()),
    ]
    return [found.indices, found.log_probs, found.tail_log_prob, log_probs.detach(), tail.detach()]


def check_padding(group: dist.ProcessGroup) -> None:
    """A teacher of another padding takes the shards of the student, which has 16 rows, of which 15 count."""
    rank, size = group.rank(), group.size()
    hidden = torch.linspace(-1, 2, 6, dtype=torch.float64).view(2, 3)
    weight = torch.linspace(0, 2, 48, dtype=torch.float64).view(16, 3).sin()
    student = losses.deferred_logits(hidden, weight.chunk(size)[rank], tp_group=group)
    for rows in (4, 12, 20):
        num_ids = min(15, rows)
        weight_of_teacher = torch.linspace(1, 2, 3 * rows, dtype=torch.float64).view(rows, 3).sin()
        bias = weight_of_teacher[:, 0]
        head = losses.OutputHead(weight_of_teacher.chunk(size)[rank], bias.chunk(size)[rank])
        head = head.resharded(16 // size, group)
        (teacher,) = losses.FullDistribution.from_hidden(hidden, head).logits()
        value = losses.full_vocabulary_divergence(student, teacher, num_ids=num_ids, tp_group=group)
        whole = hidden @ weight.T, hidden @ weight_of_teacher.T + bias
        log_p, log_q = (logits[:, :num_ids].log_softmax(1) for logits in whole)
        assert (value - (log_p.exp() * (log_p - log_q)).sum(1)).abs().max() < 1e-12


CHECKS: tuple[Callable[[dist.ProcessGroup], None], ...] = (
    check_dense,
    check_extremes,
    check_poisons,
    check_no_rows,
    check_refusals,
    check_refused_on_one_rank,
    check_selection,
    check_padding,
)
