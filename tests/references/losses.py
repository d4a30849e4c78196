"""Every function of logits: how it is called, its formula in float64, and where its logits may come from.

:func:`measure` compares one call with its formula. ``tests/unit/losses/test_table.py`` does so for a table of
functions, sources and options, and ``tests/real/test_losses_on_ranks.py`` for the same table on ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from megatron_rl_patches import losses
from megatron_rl_patches.losses.vocab.arguments import Rows
from megatron_rl_patches.losses.vocab.divergences import DIVERGENCES
from tests.references.dense import (
    dense_divergence,
    dense_log_probs_and_entropy,
    dense_log_probs_at,
    has_no_softmax,
    selected,
)

BETA = 0.3
ALL_COLUMNS = slice(None)
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Inputs:
    """What the functions get beside logits ``[T, V]``; ``n`` rows are selected."""

    targets: Tensor  # token ids [n]
    ids: Tensor  # token ids [n, k]; a top-k is of as many
    rows: Rows = None
    keep_mask: Tensor | None = None  # [n, V]
    teachers: tuple[Tensor, ...] = ()  # logits [n, V] of each
    teacher_weights: tuple[float, ...] | None = None  # of a mixture; None: equal ones
    old: Tensor | None = None  # logits [n, V] of the policy that sampled

    def of_columns(self, columns: slice) -> Inputs:
        """Return the inputs of a tensor-parallel rank."""
        mask, old = (x if x is None else x[:, columns] for x in (self.keep_mask, self.old))
        teachers = tuple(teacher[:, columns] for teacher in self.teachers)
        return replace(self, keep_mask=mask, old=old, teachers=teachers)

    def deferred(self, group: Any = None) -> Inputs:
        """Return inputs whose teachers, and old policy, have deferred logits of the same values."""

        def of(logits: Tensor) -> Tensor:
            is_bias = (
                ~logits.isfinite().all(0) if len(logits) else torch.zeros(logits.shape[1], dtype=torch.bool)
            )
            layer = {"bias": logits[:1].sum(0).where(is_bias, 0.0), "tp_group": group, "tile_bytes": 1 << 13}
            weight = logits.where(~is_bias, 0.0).t()
            return losses.deferred_logits(torch.eye(len(logits), dtype=logits.dtype), weight, **layer)

        old = None if self.old is None else of(self.old)
        return replace(self, teachers=tuple(of(teacher) for teacher in self.teachers), old=old)


class Function(NamedTuple):
    """A function of logits, and its formula of logits in float64, temperature and ``vocab_size``."""

    call: Callable[[Tensor, Inputs, dict[str, Any]], Sequence[Tensor]]
    formula: Callable[[Tensor, Inputs, float, int | None], Sequence[Tensor]]
    options: frozenset[str] = frozenset({"inplace_backward"})  # those that not every function has


def _log_probs(logits: Tensor, inputs: Inputs, options: dict[str, Any]) -> Sequence[Tensor]:
    mask, rows = inputs.keep_mask, inputs.rows
    return (losses.vocab_parallel_log_probs(logits, inputs.targets, rows=rows, keep_mask=mask, **options),)


def _entropy(
    logits: Tensor, inputs: Inputs, options: dict[str, Any], entropy_grad: bool = True
) -> Sequence[Tensor]:
    options = {"rows": inputs.rows, "keep_mask": inputs.keep_mask, "entropy_grad": entropy_grad, **options}
    return losses.vocab_parallel_log_probs_and_entropy(logits, inputs.targets, **options)


def _at_ids(logits: Tensor, inputs: Inputs, options: dict[str, Any]) -> Sequence[Tensor]:
    return losses.vocab_parallel_log_probs_at(logits, inputs.ids, with_tail=True, rows=inputs.rows, **options)


def _topk(logits: Tensor, inputs: Inputs, options: dict[str, Any]) -> Sequence[Tensor]:
    topk = losses.vocab_parallel_topk(logits, inputs.ids.shape[1], rows=inputs.rows, **options)
    return topk.indices.to(topk.log_probs.dtype), topk.log_probs, topk.tail_log_prob


def _divergence(
    logits: Tensor, inputs: Inputs, options: dict[str, Any], name: Any = "reverse_kl"
) -> Sequence[Tensor]:
    of_teachers = {"teacher_weights": inputs.teacher_weights, "old": inputs.old, "rows": inputs.rows}
    options = {"divergence": name, "beta": BETA, **of_teachers, **options}
    return (losses.full_vocabulary_divergence(logits, inputs.teachers, **options),)


def _dense(
    logits: Tensor, inputs: Inputs, temperature: float, vocab_size: int | None, count: int | None = None
) -> Sequence[Tensor]:
    rows = selected(logits, inputs.rows)
    options: dict[str, Any] = {"keep_mask": inputs.keep_mask, "vocab_size": vocab_size}
    return dense_log_probs_and_entropy(rows, inputs.targets, temperature=temperature, **options)[:count]


def _dense_at_ids(
    logits: Tensor, inputs: Inputs, temperature: float, vocab_size: int | None
) -> Sequence[Tensor]:
    return dense_log_probs_at(logits, inputs.ids, inputs.rows, temperature, vocab_size)


def _dense_topk(
    logits: Tensor, inputs: Inputs, temperature: float, vocab_size: int | None
) -> Sequence[Tensor]:
    rows = selected(logits.detach(), inputs.rows)[:, :vocab_size]
    ids = largest(rows, inputs.ids.shape[1])
    return ids.double(), *dense_log_probs_at(rows, ids, temperature=temperature)


def largest(logits: Tensor, k: int) -> Tensor:
    """Return the ids of the k largest logits, of equal ones the lowest ids."""
    return logits.sort(dim=1, descending=True, stable=True).indices[:, :k]


def _dense_divergence(
    logits: Tensor, inputs: Inputs, temperature: float, vocab_size: int | None, name: str = "reverse_kl"
) -> Sequence[Tensor]:
    def log_p(x: Tensor) -> Tensor:
        return (x.double() / temperature)[:, :vocab_size].log_softmax(1)

    weights = inputs.teacher_weights or (1.0,) * len(inputs.teachers)
    pairs = zip(inputs.teachers, weights, strict=True)
    log_q = torch.stack([log_p(x) + math.log(weight / sum(weights)) for x, weight in pairs]).logsumexp(0)
    log_old = None if inputs.old is None else log_p(inputs.old)
    return (dense_divergence(name, log_p(selected(logits, inputs.rows)), log_q, log_old, BETA),)


_KEPT = frozenset({"inplace_backward", "keep_mask", "fused"})
FULL_DIVERGENCES: tuple[str, ...] = tuple(name for name in DIVERGENCES if name != "generalized_kl")
FUNCTIONS: dict[str, Function] = {
    "log-probs": Function(_log_probs, partial(_dense, count=1), _KEPT),
    "entropy": Function(_entropy, _dense, _KEPT),
    "entropy as a metric": Function(partial(_entropy, entropy_grad=False), _dense, _KEPT),
    "at ids": Function(_at_ids, _dense_at_ids),
    "top-k": Function(_topk, _dense_topk, frozenset()),
    **{
        name: Function(partial(_divergence, name=name), partial(_dense_divergence, name=name))
        for name in FULL_DIVERGENCES
    },
}


#: How logits of other strides are made of such that own their storage.
STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "existing": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "middle of something": lambda x: torch.cat([x, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]],
    "one row again and again": lambda x: x[:1].expand(len(x), -1),
}


class Made(NamedTuple):
    """Logits of a rank, and what they are made of."""

    logits: Tensor
    leaves: Sequence[Tensor]  # those that require a gradient
    exact: Tensor  # the logits of all ranks in float64
    exact_leaves: Sequence[Tensor]  # what they are made of
    part_of: Callable[[Tensor], Tensor] = lambda gradient: gradient  # of an exact leaf, what this rank has
    by_row: bool = True  # the leaf has the logits' values, so that its gradient is compared row by row


def existing(
    whole: Tensor, chosen: Tensor, columns: slice, group: Any, view: Callable[[Tensor], Tensor]
) -> Made:
    leaf = whole[:, columns].detach().clone().requires_grad_()
    logits, exact = view(leaf * 1), view(whole.double()).requires_grad_()
    return Made(logits, [logits], exact, [exact], lambda gradient: gradient[:, columns])


def deferred(
    whole: Tensor,
    chosen: Tensor,
    columns: slice,
    group: Any,
    *,
    trains_weight: bool,
    divisor: float = 1.0,
    **options: Any,
) -> Made:
    """Return products in which nothing is rounded, since one side is the identity.

    Hidden states of rows that nobody chose are NaN. What is not finite in a whole column is the bias.
    """
    rows, vocabulary = whole.shape
    is_bias = ~whole[chosen].isfinite().any(0)
    bias = torch.where(is_bias, whole[chosen][:1].sum(0), 0.0).to(whole.dtype)
    values = torch.where(is_bias | ~chosen[:, None], 0.0, whole).to(whole.dtype)
    leaf = (values[:, columns] if trains_weight else values).clone().requires_grad_()
    exact = values.double().requires_grad_()
    if trains_weight:
        hidden, weight = torch.eye(rows, dtype=whole.dtype), leaf.t()
    else:
        hidden, weight = leaf * 1, torch.eye(vocabulary, dtype=whole.dtype)[columns]
    hidden = torch.where(chosen[:, None], hidden, math.nan)[None]
    logits = losses.deferred_logits(hidden, weight, bias=bias[columns], tp_group=group, **options)
    logits = logits.transpose(0, 1).contiguous().view(rows, -1)
    if divisor != 1:
        logits = logits / divisor
    part_of = (lambda gradient: gradient[:, columns]) if trains_weight else Made._field_defaults["part_of"]
    return Made(logits, [leaf], (exact + bias.double()) / divisor, [exact], part_of)


def product(
    whole: Tensor, chosen: Tensor, columns: slice, group: Any, trained: Sequence[str] = (), **options: Any
) -> Made:
    """Return products of other values on one rank: rows from next to uniform to next to one-hot.

    What is not finite in a whole column is the bias. Of 16-bit tensors logits are rounded as the model's own
    ones are, or of ``logit_dtype``.
    """
    (rows, vocabulary), generator = whole.shape, torch.Generator().manual_seed(0)
    bias = torch.randn(vocabulary, generator=generator)
    leaves = {
        "hidden": torch.randn(rows, 12, generator=generator) * torch.logspace(-2, 0.7, rows)[:, None],
        "weight": torch.randn(vocabulary, 12, generator=generator),
        "bias": torch.where(whole[chosen].isfinite().all(0), bias, whole[chosen][:1].sum(0)),
    }
    leaves = {name: leaf.to(whole.dtype).requires_grad_(name in trained) for name, leaf in leaves.items()}
    is_rounded = whole.dtype in HALVES and "logit_dtype" not in options
    exact_dtype = whole.dtype if is_rounded else torch.float64
    exact = {
        name: leaf.detach().to(exact_dtype, copy=True).requires_grad_(name in trained)
        for name, leaf in leaves.items()
    }
    logits = losses.deferred_logits(leaves["hidden"], leaves["weight"], bias=leaves["bias"], **options)
    mine, exact_leaves = ([tensors[name] for name in trained] for tensors in (leaves, exact))
    return Made(logits, mine, linear(*exact.values()).double(), exact_leaves, by_row=False)


#: Whole logits, which rows count, columns of this rank and its group -> logits.
SOURCES: dict[str, Callable[[Tensor, Tensor, slice, Any], Made]] = {
    **{name: partial(existing, view=view) for name, view in STRIDES.items()},
    "deferred": partial(deferred, trains_weight=True, tile_bytes=1 << 14),
    "deferred, frozen": partial(deferred, trains_weight=False, tile_bytes=1 << 14),
    "deferred, divided": partial(deferred, trains_weight=True, divisor=1.3, keep_bytes=40_000),
    "deferred, frozen, divided": partial(deferred, trains_weight=False, divisor=1.3, keep_bytes=1 << 20),
    "product": partial(product, trained=("hidden", "weight", "bias"), tile_bytes=1 << 14),
    "product, kept": partial(product, trained=("hidden", "weight"), tile_bytes=1 << 14, keep_bytes=1 << 20),
    "product, frozen": partial(product, trained=("hidden",), tile_bytes=1 << 12, keep_bytes=40_000),
    "product of a body": partial(product, trained=("weight", "bias")),
    "product in float32": partial(
        product, trained=("hidden", "weight", "bias"), tile_bytes=1 << 13, logit_dtype=torch.float32
    ),
    "product in float32, kept": partial(
        product, trained=("hidden",), keep_bytes=1 << 20, logit_dtype=torch.float32
    ),
}
#: Those whose logits may be overwritten.
OWN_STORAGE = ("existing", "transposed")


class Errors(NamedTuple):
    """The largest error of each result, and of any gradient, in units of their scale; and the results."""

    values: Sequence[float]
    gradient: float
    results: Sequence[Tensor]

    @property
    def value(self) -> float:
        return max(self.values)

    def __repr__(self) -> str:
        return f"{self.values} of values, {self.gradient:.2e} of gradients"


def measure(
    name: str,
    whole: Tensor,
    inputs: Inputs,
    source: str = "existing",
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    columns: slice = ALL_COLUMNS,
    group: dist.ProcessGroup | None = None,
    strange: bool = False,
    **options: Any,
) -> Errors:
    """Compare the values and gradients of a function with its formula; each value has a weight of its own.

    Errors are relative to a value, or to the largest gradient of its row, where what is below 1e-6 counts as
    1e-6. Divergences and products are measured as if no value were below one, and gradients of products
    relative to the largest of all. ``strange`` logits have NaN and infinities, which must be in the same
    places as in the formula; their values are measured as if none were below one, gradients below 0.1.
    """
    function, rows = FUNCTIONS[name], torch.arange(len(whole), device=whole.device)
    chosen = torch.isin(rows, selected(rows, inputs.rows))
    made = SOURCES[source](whole, chosen, columns, group)
    part = inputs.of_columns(columns)
    if source not in STRIDES:
        part = part.deferred(group)
    options |= {"temperature": temperature, "vocab_size": vocab_size, "tp_group": group}
    results = function.call(made.logits, part, options)
    assert all(x.is_deferred for x in (made.logits, *part.teachers) if source not in STRIDES)
    expected = function.formula(made.exact, inputs, temperature, vocab_size)
    if name == "top-k" and strange:  # of a row without a softmax they are some ids, each once
        ids, has_none = results[0], has_no_softmax(selected(made.exact.detach(), inputs.rows))
        assert all({*row} <= {*range(whole.shape[1])} and len({*row}) == len(row) for row in ids.tolist())
        expected = torch.where(has_none[:, None], ids, expected[0]), *expected[1:]
    without_gradient = {"top-k": {0, 1, 2}, "entropy as a metric": {1}}.get(name, set())
    assert {i for i, x in enumerate(results) if not x.requires_grad} == without_gradient
    assert {x.dtype for x in results} == {torch.float64 if whole.dtype == torch.float64 else torch.float32}
    smallest = 1.0 if name in FULL_DIVERGENCES or not made.by_row else 1e-6
    of_values = [
        error(x, exact, exact.abs() + 1 if strange else exact.abs().clamp(min=smallest), strange)
        for x, exact in zip(results, expected, strict=True)
    ]
    # What is -inf is no id, or has no derivative in the definition. Of strange rows some have no weight.
    generator = torch.Generator().manual_seed(5)
    counted = torch.rand(len(results[0]), generator=generator) < (0.7 if strange else 1.1)
    trained = [
        (x, exact, torch.where((exact == -math.inf) | ~counts, 0.0, weight.to(exact)))
        for x, exact in zip(results, expected, strict=True)
        for counts in [counted.view(-1, *[1] * (x.dim() - 1))]
        for weight in [torch.rand(x.shape, generator=generator) * 3 - (0.0 if strange else 1.0)]
        if x.requires_grad
    ]
    if not trained:
        return Errors(of_values, 0.0, results)
    of_weights = [torch.where(weight == 0, 0.0, exact) for _, exact, weight in trained]
    exact_gradients = torch.autograd.grad(of_weights, made.exact_leaves, [weight for *_, weight in trained])
    gradients = torch.autograd.grad(
        [x for x, *_ in trained], made.leaves, [weight.to(x.dtype) for x, _, weight in trained]
    )
    counts = torch.stack([(w if w.dim() > 1 else w[:, None]).any(1) for *_, w in trained]).any(0)
    has_gradient = torch.zeros_like(chosen).index_put_((selected(rows, inputs.rows),), counts)
    left_out_is_nan = inputs.keep_mask is not None
    of_gradients = []
    for mine, leaf, exact in zip(gradients, made.leaves, exact_gradients, strict=True):
        assert mine.dtype == leaf.dtype
        if not made.by_row:
            smallest = 1e-6 if whole.dtype in HALVES else 1.0
            of_gradients.append(error(mine, exact, exact.abs().amax().clamp(min=smallest)))
            continue
        # A row whose values have no weight has no gradient, whatever its logits are.
        exact = made.part_of(torch.where(has_gradient[:, None], exact, 0.0))
        if left_out_is_nan:  # of a row that is NaN; columns that the mask leaves out may be so, too
            mine = torch.where(exact.isnan().any(1, keepdim=True) & ~exact.isnan() & mine.isnan(), 0.0, mine)
        finite = torch.where(exact.isfinite(), exact, 0.0).abs()
        scale = finite.amax(1, keepdim=True).clamp(min=0.1 if strange else 1e-6) + finite * strange
        of_gradients.append(error(mine, exact, scale, strange))
        is_padding = torch.arange(whole.shape[1], device=whole.device) >= (vocab_size or whole.shape[1])
        assert not mine[~chosen].any() and not mine[:, made.part_of(is_padding[None])[0]].any()
    return Errors(of_values, max(of_gradients), results)


def error(actual: Tensor, expected: Tensor, scale: Tensor, rounded: bool = False) -> float:
    """Return the largest error in units of a scale; infinite if NaN is not where it is expected."""
    actual, expected = actual.detach(), expected.detach()
    expected = expected.to(actual.dtype).double() if rounded else expected
    errors = torch.where(actual == expected, 0.0, (actual.double() - expected).abs() / scale)
    errors = torch.where(actual.isnan() & expected.isnan(), 0.0, errors)
    return errors.nan_to_num(math.inf).max().item() if errors.numel() else 0.0
