"""Logits split over real tensor-parallel ranks (gloo): values, gradients, collectives, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import (
    vocab_parallel_log_probs,
    vocab_parallel_log_probs_and_entropy,
    vocab_parallel_log_probs_at,
)
from tests.ranks import everywhere, on_ranks
from tests.references.dense import IGNORE, errors
from tests.references.sent_bytes import sent_bytes
from tests.unit.losses.logits.test_log_probs import (
    EXTREMES,
    FLOAT32,
    GRADIENT_BOUND,
    random_logits,
    random_targets,
)

T, V = 11, 1004
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
    check_dense(group)
    check_extremes(group)
    check_ties_of_partitions(group)
    check_poisons(group)
    check_no_rows(group)
    check_refusals(group)
    check_refused_on_one_rank(group)
    values = check_collectives(group)
    # All ranks have the same bits.
    assert len(set(everywhere(b"".join(value.numpy().tobytes() for value in values)))) == 1
    with sent_bytes() as calls:
        check(random_logits(T, V), random_targets(T, V), dist.new_subgroups(1)[0])
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


def check_dense(group: dist.ProcessGroup) -> None:
    for dtype in GRADIENT_BOUND:
        for options in OPTIONS:
            logits = random_logits(T, V, dtype)
            n = len(torch.arange(T)[options.get("rows", slice(None))])
            check(logits, at_borders(n, group), group, **options)


def check_extremes(group: dist.ProcessGroup) -> None:
    """On some ranks no column may count at all, or only ones with probability zero."""
    for logits in EXTREMES.values():
        for keep_mask in (None, torch.zeros(4, 1000, dtype=torch.bool)):
            check(logits[:, :1000], torch.tensor([7, 7, IGNORE, 7]), group, keep_mask=keep_mask)
    elsewhere = random_logits(4, V)
    elsewhere[:, : V // 2] = -float("inf")
    check(elsewhere, torch.full((4,), V - 1), group)


def check_ties_of_partitions(group: dist.ProcessGroup) -> None:
    """The largest logit is on every rank, which may have a single column."""
    for columns in (group.size(), 2 * group.size()):
        targets = torch.tensor([0, 1, columns - 1, IGNORE]).clamp(max=columns - 1)
        check(torch.zeros(4, columns), targets, group)


def check_poisons(group: dist.ProcessGroup) -> None:
    """What is NaN or infinite on one rank spoils its row on all of them, and no other row."""
    not_finite = torch.arange(T) % 5 == 3
    for value in (float("nan"), float("inf")):
        for column in (5, V - 2):
            logits = random_logits(T, V)
            logits[not_finite, column] = value
            part = logits[:, mine(group)].clone().requires_grad_()
            found = vocab_parallel_log_probs_and_entropy(part, torch.arange(T), tp_group=group, fused=False)
            sum(values.sum() for values in found).backward()
            for values in (*found, part.grad.sum(1)):
                assert torch.equal(values.isnan(), not_finite)


def check_no_rows(group: dist.ProcessGroup) -> None:
    """Empty calls take part as well."""
    nothing = torch.zeros(0, dtype=torch.int64)
    with sent_bytes() as calls:
        check(torch.zeros(0, V), nothing, group)
        check(random_logits(T, V), nothing, group, rows=nothing)
    assert len(calls) == 2


def check_refusals(group: dist.ProcessGroup) -> None:
    """Bad arguments are rejected on each rank, before any of them waits for the others."""
    logits, targets = random_logits(T, V)[:, mine(group)], random_targets(T, V)
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"targets": targets + V}, f"ids below {V}"),
        ({"targets": targets[:-1]}, r"expected torch.int64 \[11\]"),
        ({"rows": torch.full((T,), 1)}, "each at most once"),
        ({"keep_mask": KEEP[:, :-4]}, "expected torch.bool"),
        ({"temperature": 0.0}, "temperature"),
        ({"logits": logits[None]}, "vocab / tp"),
    )
    others = dist.new_group([group.size() - 1])
    with sent_bytes() as calls:
        for changes, message in wrong:
            arguments = {"logits": logits, "targets": targets, "tp_group": group, **changes}
            with pytest.raises(InvalidInputError, match=message):
                vocab_parallel_log_probs(**arguments)
        if group.rank() == 0:
            with pytest.raises(InvalidInputError, match="not in tp_group"):
                vocab_parallel_log_probs(logits, targets, tp_group=others)
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
                    vocab_parallel_log_probs(
                        logits, targets, tp_group=group, rows=rows, inplace_backward=True
                    )
                with pytest.raises(InvalidInputError, match=expected):
                    vocab_parallel_log_probs_at(logits, indices, tp_group=group, inplace_backward=True)
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
            found = vocab_parallel_log_probs_and_entropy(logits, targets, tp_group=group, **options)
            sum(one.sum() for one in found if one.requires_grad).backward()
            options.pop("entropy_grad", None)
            logits = random_logits(T, V)[:, columns].clone()
            alone = vocab_parallel_log_probs(logits, targets, tp_group=group, **options)
        assert [name for name, _ in calls] == ["all_gather_into_tensor"] * 2
        values += [one.detach() for one in (*found, alone)]
    return values
