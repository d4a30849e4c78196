"""The divergence of two distributions over the whole vocabulary, of logits that need not exist.

Student, teachers and old policy are read in tiles, the same rows and columns of each at a time.

A Kullback-Leibler divergence takes one pass. The columns of a tile have conditional distributions ``p_i`` and
``q_i``, whose normalizers are those of the tile alone, and masses ``P_i`` and ``Q_i``. By the chain rule of
relative entropy, which holds for tiles and for tensor-parallel ranks alike::

    KL(p, q) = sum of P_i KL(p_i, q_i) + KL(P, Q)

The Jensen-Shannon divergence, and a mixture of teachers, need the normalizers of the whole vocabulary first.
They take a second pass and a second collective. So does a divergence where one distribution rules a column
out that another does not: what that costs cannot be said of a part alone.

Each column adds ``p log(p / q) - p + q``. This is never negative, and zero where both have the same bits; the
added terms cancel in the sum. It is computed from the difference of the logits, so that a divergence has
correct digits where student and teacher are nearly the same.

The gradient there is a small difference of log-probabilities, next to which the rounding of the normalizers
is not small. This rounding moves all columns of a row alike. So the sum over the row, which the gradient
subtracts, is that of the same rounded numbers: the second value of :meth:`_Compared.terms`. It also says how
much the rounding has added to the divergence; see :func:`_divergence`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .autograd import all_gather, gradients_of_inputs, save_source
from .head import HeadLogits
from .inplace import StorageClaim
from .rows import SelectedRows
from .softmax import exp, stretches
from .source import Inputs, LogitSource, Tile

FullDivergence = Literal["reverse_kl", "forward_kl", "jensen_shannon", "importance_weighted_reverse_kl"]

_MINUS_INF = float("-inf")
#: A log-probability of -inf counts as so many nats.
RULED_OUT = -1e4
# The functions below have eight tensors of a block's size at once. A block is as large as if they had two:
# measured, smaller blocks cost more in calls than a larger cache saves.
_BUFFERS = 2
# Below this gap, log(p / q) + q / p - 1 is a sum of powers; its relative error is then 1e-7.
_SMALL_GAP = 0.25

Gather = Callable[[Tensor, "dist.ProcessGroup | None"], Tensor]


class Logits(NamedTuple):
    """Logits that are read, and the number that they are divided by."""

    source: LogitSource
    temperature: float


class DivergenceOptions(NamedTuple):
    """What is computed.

    Attributes:
        name: one of :data:`FullDivergence`.
        beta: parameter of ``"jensen_shannon"``.
        log_weights: logarithms of the weights of the teachers' mixture, which add up to one.
        num_ids: size of the vocabulary; columns from there on count for nothing.
        tp_group: ranks that hold the other columns.
    """

    name: FullDivergence
    beta: float
    log_weights: tuple[float, ...]
    num_ids: int
    tp_group: dist.ProcessGroup | None

    @property
    def needs_normalizers(self) -> bool:
        """Whether a tile's part depends on the normalizers of the whole vocabulary."""
        return self.name == "jensen_shannon" or len(self.log_weights) > 1


def divergence_of(student: Logits, others: Sequence[Logits], options: DivergenceOptions) -> Tensor:
    """Return the divergence ``[n]`` of the student from the teachers, which come first of ``others``.

    The old policy is the last of them, if the divergence needs one. All have the same ``n`` rows.
    """
    source = student.source
    return _Divergence.apply(  # type: ignore[no-untyped-call]
        source, student.temperature, others, options, source.claim(), *source.inputs
    )


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        source: LogitSource,
        temperature: float,
        others: Sequence[Logits],
        options: DivergenceOptions,
        claim: StorageClaim,
        *inputs: Tensor | None,
    ) -> Tensor:
        pairs = _Pairs(Logits(source, temperature), tuple(others), options)
        none = [_MINUS_INF] * (1 + len(others))
        in_one_pass = False
        if options.needs_normalizers:
            first_pass = pairs.without_kept_tiles()
            normalizers = _reduce(first_pass, _normalizers, _add_exp, none, claim.gather)
        else:
            chain = _ChainRule(options)
            parts = _reduce(pairs, chain.of_block, chain.merge, [*none, 0.0, 0.0, 0.0], claim.gather)
            normalizers, value, expected, in_one_pass = parts[:-3], parts[-3], parts[-2], not parts[-1].any()
        if not in_one_pass:
            sums = _reduce(pairs, _Sums(normalizers, options).of_block, _add, [0.0, 0.0], all_gather)
            value, expected = _divergence(sums, options)
        value = value.where((normalizers != _MINUS_INF).all(0), torch.nan)

        ctx.options, ctx.temperature, ctx.claim, ctx.others = options, temperature, claim, []
        of_others: list[Tensor | None] = []
        for other in others:
            tensors, restore = other.source.saved()
            ctx.others.append((restore, other.temperature, len(tensors)))
            of_others += tensors
        save_source(ctx, source, normalizers, expected, *of_others)
        return value.to(source.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        return (None,) * 5 + gradients_of_inputs(ctx, _gradients, gradient)


def _gradients(ctx: Any, source: LogitSource, saved: list[Any], gradient: Tensor) -> Inputs:
    normalizers, expected, *tensors = saved
    remaining, others = iter(tensors), []
    for restore, temperature, count in ctx.others:
        others.append(Logits(restore(*itertools.islice(remaining, count)), temperature))
    pairs = _Pairs(Logits(source, ctx.temperature), tuple(others), ctx.options)
    weights = (gradient / ctx.temperature)[:, None]

    def of_tile(tile: Tile, in_place: bool) -> Tensor:
        result = tile.logits.new_gradient(in_place)
        for block in pairs.blocks(tile):
            weight = weights[block.rows]
            compared = _Compared.of(block.xs, normalizers[:, block.rows], ctx.options)
            derivative = compared.derivative(expected[block.rows, None].to(source.dtype), ctx.options)
            # Rows that a loss mask leaves out may hold NaN, and zero times NaN is NaN.
            values = torch.where(weight == 0, 0.0, weight * derivative)
            block.read_from.write(result[:, block.columns], block.place, values)
        return result

    return source.gradients(of_tile, ctx.needs_input_grad[5:])


# --- blocks


class _Block(NamedTuple):
    """Some rows of a tile, or of a part of one, in the dtype of the computation.

    Attributes:
        xs: logits divided by the temperature, ``[b, w]``, of the student, the teachers and the old policy.
        rows: which of the ``n`` rows these are.
        columns: which columns of the tile.
        read_from: what the student's logits were read from.
        place: which of its rows.
    """

    xs: list[Tensor]
    rows: slice
    columns: slice
    read_from: SelectedRows
    place: slice


class _Pairs(NamedTuple):
    """The student beside the others."""

    student: Logits
    others: tuple[Logits, ...]
    options: DivergenceOptions

    def without_kept_tiles(self) -> _Pairs:
        """Return the same for a pass whose tiles backward cannot have, since another pass follows."""
        source = self.student.source
        if isinstance(source, HeadLogits):
            source = replace(source, keeps_tiles=False)
        return self._replace(student=self.student._replace(source=source))

    def blocks(self, tile: Tile) -> Iterator[_Block]:
        """Yield the blocks of a tile of the student; each has all columns of a part of the tile."""
        dtype = self.student.source.dtype
        for rows, columns in self._parts(tile):
            index = tile.logits.index
            part = replace(
                tile.logits,
                logits=tile.logits.logits[:, columns],
                index=_shifted(rows, index.start) if isinstance(index, slice) else index[rows],
            )
            whole = _shifted(rows, tile.rows.start), _shifted(columns, tile.columns.start)
            others = [(other.source.part(*whole), other.temperature) for other in self.others]
            for place in part.blocks(_BUFFERS):
                read = [(part.read(place, None), self.student.temperature)]
                read += [(x[place], temperature) for x, temperature in others]
                xs = [self._prepared(x, whole[1], temperature, dtype) for x, temperature in read]
                yield _Block(xs, _shifted(place, whole[0].start), columns, part, place)

    def _parts(self, tile: Tile) -> list[tuple[slice, slice]]:
        """Return rows and columns of a tile: all, or where it is large those of a tile of the others."""
        rows, columns = [slice(0, tile.logits.n)], [slice(0, tile.columns.stop - tile.columns.start)]
        heads = [other.source for other in self.others if isinstance(other.source, HeadLogits)]
        is_cut = isinstance(self.student.source, HeadLogits)
        if limiting := [head for head in heads if head.is_elsewhere or not is_cut]:
            widest = max(limiting, key=lambda head: head.weight.shape[1])
            rows, columns = widest.sharing(len(heads)).cut(tile.logits.n, columns[0].stop)
        return list(itertools.product(rows, columns))

    def _prepared(self, x: Tensor, columns: slice, temperature: float, dtype: torch.dtype) -> Tensor:
        rank = 0 if self.options.tp_group is None else dist.get_rank(self.options.tp_group)
        counting = self.options.num_ids - rank * self.student.source.width - columns.start
        width = columns.stop - columns.start
        x = x.to(dtype)
        if temperature != 1:
            x = x / temperature
        if counting < width or x.shape[1] < width:
            counting = max(min(counting, x.shape[1]), 0)
            filler = x.new_full((len(x), width - counting), _MINUS_INF)
            x = torch.cat([x[:, :counting], filler], 1)
        return x


def _reduce(
    pairs: _Pairs,
    of_block: Callable[[_Block], Tensor],
    merge: Callable[[Tensor], Tensor],
    empty: list[float],
    gather: Gather,
) -> Tensor:
    """Return values over all columns, float64 ``[m, n]``, from those of blocks, ``[m, b]``.

    Args:
        merge: makes values ``[m, n]`` of those of parts, ``[parts, m, n]``.
        empty: the ``m`` values of no columns at all.
        gather: gathers ``[m, n]`` of the ranks to ``[tp, m, n]``.
    """
    source = pairs.student.source
    total = torch.tensor(empty, dtype=torch.float64, device=source.device)[:, None].repeat(1, source.n)
    for tile in source.tiles():
        for block in pairs.blocks(tile):
            total[:, block.rows] = merge(torch.stack([total[:, block.rows], of_block(block)]))
    return merge(gather(total, pairs.options.tp_group))


# --- parts of the divergence


def _normalizers(block: _Block) -> Tensor:
    """Return the logarithms of the sums of ``exp(x)``, float64 ``[m, b]``; -inf where no column counts."""
    return torch.stack([_log_sum_exp(x) for x in block.xs])


def _log_sum_exp(x: Tensor) -> Tensor:
    largest = x.amax(1)
    reference = largest.where(largest != _MINUS_INF, 0.0)
    return reference.double() + _sum(exp(x - reference[:, None])).log()


class _ChainRule:
    """The parts of a divergence that one pass computes: ``[m + 3, n]``.

    These are the logarithms of the masses of student, teacher and perhaps old policy, the two sums of
    :meth:`_Compared.terms` for the conditional distributions, and whether some of them rule a column out that
    others do not.
    """

    def __init__(self, options: DivergenceOptions) -> None:
        self._options = options

    def of_block(self, block: _Block) -> Tensor:
        masses = _normalizers(block)
        compared = _Compared.of(block.xs, masses, self._options)
        gaps = [compared.gap] if compared.old_gap is None else [compared.gap, compared.old_gap]
        # Where one of them rules a column out, the gap is next to RULED_OUT.
        differ = torch.stack([gap.abs().amax(1) for gap in gaps]).amax(0) > -0.5 * RULED_OUT
        sums = torch.stack([_sum(term) for term in compared.terms(self._options)])
        return torch.cat([masses, _divergence(sums, self._options), differ.double()[None]])

    def merge(self, parts: Tensor) -> Tensor:
        """Return the parts of all columns from those of tiles or ranks, ``[parts, m + 3, n]``."""
        *masses, values, expected, differ = parts.unbind(1)
        totals = torch.stack([mass.logsumexp(0) for mass in masses])
        compared = _Compared.of([mass.T for mass in masses], totals, self._options)
        share = compared.q if self._options.name == "forward_kl" else compared.p
        between = compared.terms(self._options)
        sums = [
            (share * part.T + term).sum(1) for part, term in zip((values, expected), between, strict=True)
        ]
        return torch.cat([totals, torch.stack(sums), differ.amax(0)[None]])


class _Sums:
    """The sums over all columns of :meth:`_Compared.terms` when the normalizers ``[m, n]`` are known."""

    def __init__(self, normalizers: Tensor, options: DivergenceOptions) -> None:
        self._normalizers, self._options = normalizers, options

    def of_block(self, block: _Block) -> Tensor:
        compared = _Compared.of(block.xs, self._normalizers[:, block.rows], self._options)
        return torch.stack([_sum(term) for term in compared.terms(self._options)])


class _LogProbs(NamedTuple):
    """``log p = x - normalizer`` of ``x`` ``[b, w]`` and a float64 normalizer ``[b]``."""

    x: Tensor
    normalizer: Tensor

    @classmethod
    def of(cls, x: Tensor, normalizer: Tensor) -> _LogProbs:
        normalizer = normalizer.where(normalizer != _MINUS_INF, 0.0)
        return cls(torch.maximum(x, (normalizer + RULED_OUT).to(x.dtype)[:, None]), normalizer)

    @property
    def values(self) -> Tensor:
        # Rounding the normalizer first, and its remainder after, leaves an error relative to log p.
        rounded = self.normalizer.to(self.x.dtype)
        remainder = (self.normalizer - rounded).to(self.x.dtype)
        return (self.x - rounded[:, None]) - remainder[:, None]

    def minus(self, other: _LogProbs) -> Tensor:
        """Return ``log p - log q``, exactly zero where both have the same bits."""
        normalizer = self.normalizer - other.normalizer
        # As in values: the error is relative to the difference, which may be small.
        rounded = normalizer.to(self.x.dtype)
        remainder = (normalizer - rounded).to(self.x.dtype)
        return (self.x - other.x).sub_(rounded[:, None]).sub_(remainder[:, None])


@dataclass(frozen=True, eq=False)
class _Compared:
    """The student and the teacher at some columns; all tensors are ``[b, w]``.

    Attributes:
        gap: ``log p - log q``.
        old_gap: ``log p_old - log q``, if there is an old policy.
    """

    student: _LogProbs
    teacher: _LogProbs
    gap: Tensor
    old_gap: Tensor | None

    @classmethod
    def of(cls, xs: Sequence[Tensor], normalizers: Tensor, options: DivergenceOptions) -> _Compared:
        student, *others = (_LogProbs.of(x, z) for x, z in zip(xs, normalizers, strict=True))
        teachers, old = others[: len(options.log_weights)], others[len(options.log_weights) :]
        teacher = teachers[0]
        if len(teachers) > 1:
            weighted = [
                one.values + weight for one, weight in zip(teachers, options.log_weights, strict=True)
            ]
            mixture = torch.stack(weighted).logsumexp(0)
            teacher = _LogProbs(mixture, torch.zeros_like(student.normalizer))
        old_gap = old[0].minus(teacher) if old else None
        return cls(student, teacher, student.minus(teacher), old_gap)

    @cached_property
    def p(self) -> Tensor:
        """The student's probabilities."""
        return exp(self.student.values)

    @cached_property
    def q(self) -> Tensor:
        """The teacher's probabilities, which most gradients do not need."""
        return exp(self.teacher.values)

    def terms(self, options: DivergenceOptions) -> tuple[Tensor, Tensor]:
        """Return what each column adds to the divergence, and to what :meth:`derivative` subtracts."""
        if self.old_gap is not None:
            value = self.p * self.old_gap
            return value, value
        if options.name == "reverse_kl":
            return _relative_entropy(self.p, self.q, self.gap)
        if options.name == "forward_kl":
            value, negative = _relative_entropy(self.q, self.p, -self.gap)
            return value, value - negative  # q (exp(gap) - 1), which is p - q
        gap = self.gap_to_middle(options.beta)
        middle = self.p + options.beta * (self.q - self.p)
        of_teacher, _ = _relative_entropy(self.q, middle, gap - self.gap)
        of_student, expected = _relative_entropy(self.p, middle, gap)
        return of_student.lerp_(of_teacher, options.beta), (1.0 - options.beta) * expected

    def gap_to_middle(self, beta: float) -> Tensor:
        """Return ``log p - log m`` with ``m = beta q + (1 - beta) p``."""
        # log p - log m = -log1p(beta (q / p - 1)) = log p - log q - log1p((1 - beta) (p / q - 1))
        by_q = _is_positive(-1.0 - self.gap)
        ratio_minus_1 = (self.gap * (2.0 * by_q - 1.0)).expm1_()
        share = by_q * (1.0 - 2.0 * beta) + beta
        return (self.gap * by_q).sub_(ratio_minus_1.mul_(share).log1p_())

    def derivative(self, expected: Tensor, options: DivergenceOptions) -> Tensor:
        """Return the derivative of the divergence by the student's ``x``, ``[b, w]``.

        Args:
            expected: the second sum of :meth:`terms` over all columns, ``[b, 1]``, with which the derivatives
                of a row add up to zero.
        """
        if self.old_gap is not None:
            return self.p * (self.old_gap - expected)
        if options.name == "reverse_kl":
            return self.p * (self.gap - expected)
        if options.name == "forward_kl":
            near = -self.p * (-self.gap).clamp_(max=1.0).expm1_()
            return near.lerp_(self.p - self.q, _is_large(self.gap)).sub_(self.p * expected)
        return self.p * ((1.0 - options.beta) * self.gap_to_middle(options.beta) - expected)


def _relative_entropy(p: Tensor, q: Tensor, gap: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``p gap - p + q``, with correct digits near zero too, and ``p gap``, where gap is log(p / q)."""
    terms = 11 if p.dtype == torch.float64 else 6
    small = gap.clamp(-_SMALL_GAP, _SMALL_GAP)
    # gap + exp(-gap) - 1 = gap^2 / 2 - gap^3 / 6 + gap^4 / 24 - ...
    series = torch.full_like(gap, (-1.0) ** (terms - 1) / math.factorial(terms + 1))
    for k in range(terms - 2, -1, -1):
        series = series.mul_(small).add_((-1.0) ** k / math.factorial(k + 2))
    near = series.mul_(small).mul_(small).mul_(p)
    weighted = p * gap
    return near.lerp_(weighted + (q - p), _is_large(gap)), weighted


def _is_large(gap: Tensor) -> Tensor:
    return _is_positive(gap.abs().sub_(_SMALL_GAP))


def _is_positive(x: Tensor) -> Tensor:
    """Return 1 where ``x`` is positive, and 0 elsewhere; ``x`` is overwritten.

    Numbers choose between two tensors in a tenth of the time of ``torch.where`` on a CPU.
    """
    return x.sign_().clamp_(min=0.0)


def _divergence(sums: Tensor, options: DivergenceOptions) -> Tensor:
    """Return the sums of :meth:`_Compared.terms`, of which the first has become the divergence, ``[2, n]``.

    Normalizers that are off by ``d`` together add ``d ** 2 / 2`` to a Kullback-Leibler divergence.
    """
    value, expected = sums
    if options.name == "reverse_kl":
        off = expected - value  # the sum of p - q
    elif options.name == "forward_kl":
        off = expected
    else:
        return sums
    return torch.stack([(value - 0.5 * off**2).clamp(min=0.0), expected])


def _sum(x: Tensor) -> Tensor:
    return stretches(x).sum(2).sum(1, dtype=torch.float64)


def _add_exp(parts: Tensor) -> Tensor:
    return parts.logsumexp(0)


def _add(parts: Tensor) -> Tensor:
    return parts.sum(0)


def _shifted(part: slice, start: int) -> slice:
    return slice(part.start + start, part.stop + start)
