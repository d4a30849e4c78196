"""Top-k, log-probabilities and distillation of logits that four ranks have parts of, NaN and all."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_patches.losses import (
    DistillationBatch,
    DistillationOptions,
    SequenceLayout,
    TopKDistribution,
    make_distillation_loss_func,
    packed_log_probs_and_entropy,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)
from tests.unit.losses.logits.dense import dense_log_probs_and_entropy

from .positions import TAIL, Microbatch
from .strange_logits import agree, dense_log_probs_at, is_spoilt

VOCABULARY, K, TEMPERATURE, ROUNDING = 24, 3, 0.7, 2e-5
TP, CP = "tp", "cp"


class Groups(NamedTuple):
    tp: dist.ProcessGroup | None
    cp: dist.ProcessGroup | None

    @property
    def columns(self) -> slice:
        width = VOCABULARY // (self.tp.size() if self.tp else 1)
        start = self.tp.rank() * width if self.tp else 0
        return slice(start, start + width)

    @property
    def cp_rank(self) -> int:
        return self.cp.rank() if self.cp else 0

    @property
    def cp_size(self) -> int:
        return self.cp.size() if self.cp else 1


def groups_of_four() -> dict[str, Groups]:
    tp2, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    cp2, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    return {
        "TP 4": Groups(dist.group.WORLD, None),
        "TP 2 x CP 2": Groups(tp2, cp2),
        "CP 4": Groups(None, dist.group.WORLD),
    }


def check_four_ranks(cases: int) -> dict[str, tuple[int, int]]:
    """By groups: microbatches, and how many of them left a rank without a response token."""
    found = {}
    for name, groups in groups_of_four().items():
        choose, without_rows = random.Random(name), 0
        for _ in range(cases):
            case = Microbatch.random(choose, groups.cp_size, at_least=1)
            tokens = [sum(case.layout(rank).local_lengths) for rank in range(groups.cp_size)]
            without_rows += min(tokens) == 0
            check(case, groups, choose.randrange(2**31))
        found[name] = cases, without_rows
    return found


class Dense(NamedTuple):
    """Of the response tokens of all samples, end to end: what every rank has a part of."""

    logits: Tensor  # [n, V]
    targets: Tensor
    masks: list[Tensor]
    generator: torch.Generator

    @classmethod
    def random(cls, case: Microbatch, seed: int) -> Dense:
        generator = torch.Generator().manual_seed(seed)
        n = sum(case.responses)
        logits = torch.randn(n, VOCABULARY, generator=generator) * 3
        for value in (torch.nan, torch.inf, -torch.inf, -1e30, 1e30):
            places = torch.rand(n, VOCABULARY, generator=generator) < 0.004
            logits[places] = value
        logits[torch.rand(n, generator=generator) < 0.05] = -torch.inf
        masks = [(torch.rand(length, generator=generator) < 0.7).int() for length in case.responses]
        return cls(logits, torch.randint(VOCABULARY, (n,), generator=generator), masks, generator)

    def weights(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) + 0.1


def check(case: Microbatch, groups: Groups, seed: int) -> None:
    dense, layout = Dense.random(case, seed), case.layout(groups.cp_rank)
    check_topk(dense, layout, part_of(case, dense.logits, groups), groups)
    check_log_probs(case, dense, layout, groups)
    check_distillation(case, dense, layout, groups)


def part_of(case: Microbatch, logits: Tensor, groups: Groups) -> Tensor:
    """Of this rank, ``[rows, V / tp]``; NaN where nothing may be read."""
    number = {token: i for i, (token, _, _) in enumerate(case.predictors())}
    part = torch.full((len(case.streams()[groups.cp_rank]), VOCABULARY), torch.nan)
    for row, token in enumerate(case.streams()[groups.cp_rank]):
        if token != TAIL and token in number:
            part[row] = logits[number[token]]
    return part[:, groups.columns].clone().requires_grad_()


def rows_of(case: Microbatch, gradient: Tensor, layout: SequenceLayout, groups: Groups) -> tuple[Tensor, ...]:
    """The gradient's rows of this rank's tokens, and all others."""
    others = torch.ones(len(gradient), dtype=torch.bool)
    others[layout.response_rows] = False
    return gradient[layout.response_rows], gradient[others]


def check_gradient(
    case: Microbatch, part: Tensor, wanted: Tensor, layout: SequenceLayout, groups: Groups
) -> None:
    assert part.grad is not None
    mine, others = rows_of(case, part.grad, layout, groups)
    assert agree(mine, wanted[layout.response_index][:, groups.columns], ROUNDING)
    assert not others.any()


def gathered(layout: SequenceLayout, values: Tensor, groups: Groups) -> Tensor:
    return torch.cat(layout.gather_responses(values, groups.cp))


def check_topk(dense: Dense, layout: SequenceLayout, part: Tensor, groups: Groups) -> None:
    found = vocab_parallel_topk(
        part, K, tp_group=groups.tp, rows=layout.response_rows, temperature=TEMPERATURE
    )
    indices, log_probs, tail = (
        gathered(layout, values, groups) for values in (found.indices, found.log_probs, found.tail_log_prob)
    )
    order = dense.logits.sort(dim=1, descending=True, stable=True).indices[:, :K]
    spoilt = is_spoilt(dense.logits)
    assert torch.equal(indices[~spoilt], order[~spoilt])
    assert all(len(set(row)) == K and 0 <= min(row) <= max(row) < VOCABULARY for row in indices.tolist())
    for values, wanted in zip(
        (log_probs, tail), dense_log_probs_at(dense.logits, indices, None, TEMPERATURE), strict=True
    ):
        assert agree(values, wanted, ROUNDING)


def check_log_probs(case: Microbatch, dense: Dense, layout: SequenceLayout, groups: Groups) -> None:
    """Of targets and of ids, forward and backward."""
    n = len(dense.targets)
    options: dict[str, Any] = {"tp_group": groups.tp, "temperature": TEMPERATURE}
    tokens = [torch.zeros(total, dtype=torch.int64) for total in case.totals]
    for sample, response, targets in zip(
        tokens, case.responses, dense.targets.split(list(case.responses)), strict=True
    ):
        sample[len(sample) - response :] = targets
    part, leaf = part_of(case, dense.logits, groups), dense.logits.double().requires_grad_()
    found = packed_log_probs_and_entropy(part, tokens, layout, **options)
    expected = dense_log_probs_and_entropy(leaf, dense.targets, None, TEMPERATURE)
    compare(case, list(map(torch.cat, found)), list(expected), part, leaf, dense, layout, groups)

    ids = torch.randint(VOCABULARY, (n, K), generator=dense.generator)
    part, leaf = part_of(case, dense.logits, groups), dense.logits.double().requires_grad_()
    at_ids = vocab_parallel_log_probs_at(
        part, ids[layout.response_index], rows=layout.response_rows, with_tail=True, **options
    )
    expected = dense_log_probs_at(leaf, ids, None, TEMPERATURE)
    compare(case, list(at_ids), list(expected), part, leaf, dense, layout, groups)


def compare(
    case: Microbatch,
    found: list[Tensor],
    expected: list[Tensor],
    part: Tensor,
    leaf: Tensor,
    dense: Dense,
    layout: SequenceLayout,
    groups: Groups,
) -> None:
    # What is -inf is a tail of nothing, and has no derivative.
    weights = [torch.where(v.detach() > -torch.inf, dense.weights(*v.shape), 0.0) for v in expected]
    weights = [torch.where(v.isnan(), 1.0, weight) for v, weight in zip(expected, weights, strict=True)]
    full = [gathered(layout, values, groups) for values in found]
    for values, wanted in zip(full, expected, strict=True):
        assert agree(values, wanted, ROUNDING)
    # Gathered values have the gradient of all CP ranks' losses together.
    torch.autograd.backward(full, [weight / groups.cp_size for weight in weights])
    [gradient] = torch.autograd.grad(expected, leaf, [weight.double() for weight in weights])
    check_gradient(case, part, gradient, layout, groups)


def check_distillation(case: Microbatch, dense: Dense, layout: SequenceLayout, groups: Groups) -> None:
    """Of what the mask leaves out the logits may be anything; loss and gradient are those of one rank."""
    mask = torch.cat(dense.masks) != 0
    clean = torch.randn(dense.logits.shape, generator=dense.generator)
    logits = torch.where(mask[:, None], clean, dense.logits)
    other = torch.randn(dense.logits.shape, generator=dense.generator)
    ids = other.topk(K).indices
    teacher = TopKDistribution(ids, *vocab_parallel_log_probs_at(other, ids, with_tail=True))
    batch = DistillationBatch([teacher.split(case.responses)], dense.masks)
    results = []
    alone = SequenceLayout.build(case.totals, case.responses)
    whole = torch.zeros(alone.num_rows, VOCABULARY)
    whole[alone.response_rows] = clean
    for leaf, where, tp, cp in (
        (whole.requires_grad_(), alone, None, None),
        (part_of(case, logits, groups), layout, groups.tp, groups.cp),
    ):
        loss_func = make_distillation_loss_func(where, batch, DistillationOptions(), tp_group=tp, cp_group=cp)
        loss, count, metrics = loss_func(leaf.view(*where.logits_shape, -1))
        loss.backward()
        results.append((loss.detach(), count, metrics, leaf))
    (loss, count, metrics, _), (loss_split, count_split, metrics_split, part) = results
    assert agree(loss_split, loss, ROUNDING) and count_split == count
    assert all(agree(metrics_split[name], metrics[name], ROUNDING) for name in metrics)
    assert whole.grad is not None
    check_gradient(case, part, whole.grad[alone.response_rows] * groups.cp_size, layout, groups)
