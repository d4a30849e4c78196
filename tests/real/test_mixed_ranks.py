"""Ranks that hold different kinds of logits: on one of them, some code has made deferred logits ordinary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_patches.losses import (
    deferred_logits,
    full_vocabulary_divergence,
    vocab_parallel_log_probs,
    vocab_parallel_log_probs_and_entropy,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)
from megatron_rl_patches.losses.logits.deferred import rows_of_existing
from tests.ranks import everywhere, on_ranks
from tests.references.dense_topk import dense_log_probs_at
from tests.references.sent_bytes import sent_bytes
from tests.unit.losses.objectives.test_divergences import NAMES, dense

T, H, V, BETA = 5, 3, 24, 0.5
INF = float("inf")
BOUND = {torch.float64: 1e-10, torch.float32: 2e-5}


class Tripled(torch.autograd.Function):
    """Logits whose gradient no known operation has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


def hooked(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: 2 * gradient)
    return x


def written(write: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def operation(x: Tensor) -> Tensor:
        write(x)
        return x

    return operation


def last(x: Tensor) -> Tensor:
    """Return a mask of the last columns, the padding of a vocabulary."""
    return torch.arange(x.shape[1]) >= x.shape[1] - 2


#: Everything that makes deferred logits ordinary, or gives them another scale, on one rank only.
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "masked_fill": lambda x: x.masked_fill(last(x), -INF),
    "divided twice": lambda x: x / 1.7,
    "written": written(lambda x: x[:, -2:].fill_(-INF)),
    "written, then divided": lambda x: written(lambda x: x[:2].mul_(1.1))(x) / 1.3,
    "hook": hooked,
    "function": lambda x: Tripled.apply(x),  # type: ignore[no-untyped-call]
    "where": lambda x: torch.where(last(x), x.new_tensor(-30.0), x),
    "multiplied": lambda x: x * 1.5,
    "added": lambda x: x + 0.0,
    "divided per row": lambda x: x / torch.linspace(1, 2, len(x), dtype=x.dtype)[:, None],
    "divided in place": written(lambda x: x.div_(1.7)),
    "masked in place": written(lambda x: x.masked_fill_(last(x), -INF)),
    "multiplied in place": written(lambda x: x.mul_(1.5)),
    "cut and joined": lambda x: torch.cat([x[:, :1], x[:, 1:]], 1),
    "padded": lambda x: torch.nn.functional.pad(x[:, :-1], (0, 1), value=-INF),
    "softcap": lambda x: 5 * torch.tanh(x / 5),
    "clamped": lambda x: x.clamp(min=-1.5),
    "transposed": lambda x: x.t().contiguous().t(),
    "scatter": lambda x: x.scatter(1, torch.arange(len(x))[:, None] % x.shape[1], 0.5),
    "nan_to_num": lambda x: x.nan_to_num(),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.0),
    "retain_grad": written(lambda x: x.retain_grad() if x.grad_fn is not None else None),
    "unbound": lambda x: torch.stack(x.unbind(1), 1),
    "sorted rows": lambda x: x[torch.arange(len(x))] * 1,
    "read": written(lambda x: x.exp().sum()),
    "no operation": lambda x: x,
}
DEFAULT = ("masked_fill", "divided twice", "written", "written, then divided", "hook", "function")
# None of them is in a rank's last two columns.
TARGETS = torch.tensor([0, 6, 12, 14, 1])
IDS = torch.tensor([[0, 3, 13], [13, 13, 2], [7, 1, 0], [20, 3, -100], [6, 12, 18]])


def losses(x: Tensor, teacher: Tensor, old: Tensor, group: Any) -> Iterator[tuple[str, Tensor]]:
    options: dict[str, Any] = {"tp_group": group, "temperature": 1.2}
    yield "log-probs", vocab_parallel_log_probs(x, TARGETS, **options)[:, None]
    yield "scores", torch.stack(vocab_parallel_log_probs_and_entropy(x, TARGETS, **options), 1)
    kept = (torch.arange(T * x.shape[1]) % 3 != 1).view(T, -1)
    masked = vocab_parallel_log_probs_and_entropy(x, TARGETS, keep_mask=kept, **options)
    yield "masked", torch.stack(masked, 1)
    at, tail = vocab_parallel_log_probs_at(x, IDS, with_tail=True, **options)
    yield "at ids", torch.cat([at.masked_fill(IDS < 0, 0.0), tail[:, None]], 1)
    topk = vocab_parallel_topk(x, 4, **options)
    yield "top-k", torch.cat([topk.log_probs, topk.tail_log_prob[:, None]], 1)
    for name in NAMES:
        value = full_vocabulary_divergence(x, teacher, old=old, divergence=name, beta=BETA, **options)
        yield name, value[:, None]
    value = full_vocabulary_divergence(x, [teacher, old], **options)
    yield "mixture", value[:, None]


def expected_losses(x: Tensor, teacher: Tensor, old: Tensor, width: int) -> Iterator[Tensor]:
    x, teacher, old = x / 1.2, teacher / 1.2, old / 1.2
    log_p = x.log_softmax(1)
    target = TARGETS[:, None]
    of_target = log_p.gather(1, target)
    entropy = -(log_p.exp() * log_p.clamp(min=-700.0)).sum(1, keepdim=True)  # 0 * inf is NaN
    kept = (torch.arange(T * width) % 3 != 1).view(T, -1).repeat(1, V // width)
    kept = kept.scatter(1, target, True)
    yield of_target
    yield torch.cat([of_target, entropy], 1)
    yield torch.cat([x.masked_fill(~kept, -INF).log_softmax(1).gather(1, target), entropy], 1)
    at, tail = dense_log_probs_at(x, IDS)
    yield torch.cat([at.masked_fill(IDS < 0, 0.0), tail[:, None]], 1)
    top = log_p.sort(1, descending=True).values
    yield torch.cat([top[:, :4], top[:, 4:].logsumexp(1, keepdim=True)], 1).detach()
    floored = [one - one.logsumexp(1, keepdim=True) for one in (x, teacher, old)]
    x, teacher, old = (one.clamp(min=-700.0) for one in floored)  # where -inf in all is no NaN
    for name in NAMES:
        yield formula(name, x, [teacher], old)[:, None]
    yield formula("reverse_kl", x, [teacher, old], old)[:, None]


def formula(name: str, log_p: Tensor, teachers: list[Tensor], old: Tensor) -> Tensor:
    return dense(name, log_p, teachers, [1 / len(teachers)] * len(teachers), old, BETA)


def check(
    operation: Callable[[Tensor], Tensor], odd: int, divisor: float, dtype: torch.dtype, kind: str
) -> None:
    """Apply the operation to the student's, teacher's and old policy's logits on one rank; compare losses."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    generator = torch.Generator().manual_seed(odd)
    hidden = torch.randn(3, T, H, generator=generator, dtype=torch.float64).to(dtype)
    weights = torch.randn(3, V, H, generator=generator, dtype=torch.float64).to(dtype)

    def on_rank(number: int, logits: Tensor) -> Tensor:
        divided = logits / divisor / divisor
        return operation(divided) if number == odd else divided

    whole = [tensor.double().requires_grad_() for tensor in (hidden[0], weights[0])]
    parts = [whole[1].chunk(size), *(weight.double().chunk(size) for weight in weights[1:])]
    of_all = (whole[0], *hidden[1:].double())
    expected_logits = [
        torch.cat([on_rank(number, x @ part.T) for number, part in enumerate(shards)], 1)
        for x, shards in zip(of_all, parts, strict=True)
    ]
    leaves = [hidden[0].clone().requires_grad_(), weights[0].chunk(size)[rank].clone().requires_grad_()]

    def own(number: int) -> Tensor:
        x, weight = leaves if number == 0 else (hidden[number], weights[number].chunk(size)[rank])
        logits = deferred_logits(x, weight, tp_group=group, tile_bytes=8 * 4 * dtype.itemsize)
        if kind == "existing":
            logits = rows_of_existing((logits + 0).clone())
        return on_rank(rank, logits)

    gradients = []
    with sent_bytes() as calls:
        results = list(losses(own(0), own(1).detach(), own(2).detach(), group))
        for _, value in results:
            if value.requires_grad:
                total = (value * weights_like(value)).sum()
                gradients.append(torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True))
    bits = b"".join(value.detach().numpy().tobytes() for _, value in results)
    alike = everywhere((bits, tuple(calls)))
    # No rank compares before all have called all collectives.
    assert all(of_rank == alike[0] for of_rank in alike), "all ranks have the same bits, and send alike"
    student, teacher, old = expected_logits
    expected = list(expected_losses(student, teacher.detach(), old.detach(), V // size))
    for (name, value), reference in zip(results, expected, strict=True):
        assert distance(value, reference) <= BOUND[dtype], (name, value, reference)
    for (name, value), reference in zip(results, expected, strict=True):
        if not value.requires_grad:
            continue
        of_hidden, of_weight = gradients.pop(0)
        total = (reference * weights_like(reference)).sum()
        expected_hidden, expected_weight = torch.autograd.grad(total, whole, retain_graph=True)
        pairs = (of_hidden, expected_hidden), (of_weight, expected_weight.chunk(size)[rank])
        for gradient, reference in pairs:
            gradient = torch.zeros_like(reference) if gradient is None else gradient
            assert distance(gradient, reference) <= BOUND[dtype], (name, gradient, reference)


def weights_like(values: Tensor) -> Tensor:
    return torch.linspace(-1, 2, values.numel(), dtype=torch.float64).view(values.shape)


def distance(found: Tensor, expected: Tensor) -> float:
    return float(
        (found.double() - expected).detach().abs().max() / expected.detach().abs().max().clamp(min=1.0)
    )


@on_ranks(2, megatron=False)
def test_one_rank_of_two() -> None:
    for number, name in enumerate(DEFAULT):
        check(OPERATIONS[name], number % 2, 1.7, (torch.float64, torch.float32)[number // 3], "deferred")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@on_ranks(lambda size: size, megatron=False, timeout=300)
def test_every_operation_on_one_rank(size: int) -> None:
    settings = cycle(((1.0, torch.float32), (1.7, torch.float64), (1.7, torch.float32)))
    ranks = cycle(range(size))
    for name, kind in product(OPERATIONS, ("deferred", "existing")):
        for _ in range(4 // size):
            odd, (divisor, dtype) = next(ranks), next(settings)
            try:
                check(OPERATIONS[name], odd, divisor, dtype, kind)
            except Exception as error:
                raise AssertionError(name, odd, divisor, dtype, kind) from error
