"""The divergence of a student from its teachers over the whole vocabulary, computed tile by tile.

A Kullback-Leibler divergence takes one pass. The columns of a tile have conditional distributions ``p_i`` and
``q_i``, whose normalizers are those of the tile alone, and masses ``P_i`` and ``Q_i``. By the chain rule of
relative entropy, which holds for tiles and for tensor-parallel ranks alike::

    KL(p, q) = sum of P_i KL(p_i, q_i) + KL(P, Q)

Mixtures, of teachers or with the student, need the normalizers of the whole vocabulary first: a second pass
and a second collective. So does a Kullback-Leibler divergence where only one distribution rules an id out:
the log-prob of that id is limited (see RULED_OUT), which takes the normalizer of the whole vocabulary.

For large logits ``torch.compile`` makes two kernels: one reads the logits of student and teachers and
computes a partial result for each stretch of columns, the other combines the partial results of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import InvalidInputError
from .arguments import Rows, VocabParallelOptions, check_list, is_number
from .divergences import (
    Compared,
    Divergence,
    DivergenceName,
    Normalizer,
    divergence_named,
    log_sum_exp,
    sum_of_rows,
)
from .reduction import Block, Blocks, Loss, Read, Results, Writer
from .sources import SelectedRows, Source, Tensors, rows_of

_MINUS_INF, _INF = float("-inf"), float("inf")
# If the log-probabilities of a column, or of a block of columns, differ by more nats, one distribution rules
# it out. This is a tenth of RULED_OUT, which limits a column's log-probability in its row: that is a sum (of
# the column in its stretch, of the stretch in its tile, ...), whose terms may be well above it.
_FAR = 1e3
# If the teacher's log-probability exceeds the student's by more nats, the student's probability is less than
# a millionth of the teacher's, and subtracting one from the other costs no digits.
_LARGE = 16.0
# A divergence has eight tensors of a block's size at once. Blocks are as large as if it had two: measured,
# smaller ones cost more in calls than a larger cache saves.
_BLOCKS = Blocks(2, has_work=False, compiled=16)

T = TypeVar("T")


def full_vocabulary_divergence(
    student: Tensor,
    teacher: Tensor | Sequence[Tensor],
    *,
    divergence: DivergenceName = "reverse_kl",
    beta: float = 0.5,
    teacher_weights: Sequence[float] | None = None,
    old: Tensor | None = None,
    rows: Rows = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    inplace_backward: bool = False,
    block_bytes: int | None = None,
) -> Tensor:
    """Return the divergence of the student's next-token distributions from the teacher's, per row, in nats.

    The divergences are those of :mod:`.divergences` but ``"generalized_kl"``, summed over all ids.

    Args:
        student: logits or :class:`.DeferredLogits` ``[T, V / tp]``. Only these have a gradient. For the other
            arguments see :func:`.vocab_parallel_log_probs`; the temperature is that of all.
        teacher: logits or deferred logits ``[n, V / tp]``, one row for each selected row of the student. The
            hidden sizes may differ. Several teachers are a mixture: their probabilities are averaged.
        divergence: its name.
        beta: weight of the teacher in the mixture of those that have one.
        teacher_weights: weights of the mixture, not negative; they are divided by their sum. ``None`` weights
            all teachers alike.
        old: logits or deferred logits ``[n, V / tp]`` of the policy that sampled, for
            ``"importance_weighted_reverse_kl"``.
        vocab_size: with it, and without tensor parallelism, the logits may be padded to different widths;
            with tensor parallelism see :meth:`.OutputHead.resharded`.

    Returns:
        ``[n]`` in float32 (float64 for float64 logits of the student), the same bits on all ranks of
        ``tp_group``. A log-probability below -10,000, such as -inf, counts as -10,000. NaN and +inf make NaN
        of their own row. A row whose value gets a gradient of zero has one of zero, whatever its logits are.

    Raises:
        InvalidInputError: arguments do not fit; on every rank alike, before any collective. There is one
            all-gather of up to six numbers per row, and a second one of two or three for divergences from a
            mixture of student and teacher, for a mixture of teachers, and where log-probabilities of an id,
            or of a block of ids, are more than 1,000 nats apart.
    """
    teachers = [teacher] if isinstance(teacher, Tensor) else check_list("teacher", teacher)
    measure = divergence_named(divergence, beta)
    if not measure.counts_tail:
        raise InvalidInputError(f"divergence is {divergence!r}, which is over k ids: use 'reverse_kl'")
    counted = weighted([(f"teacher {n}", logits) for n, logits in enumerate(teachers)], teacher_weights)
    others = [teacher for _, teacher in counted]
    if measure.needs_old:
        if old is None:
            raise InvalidInputError(f"divergence is {divergence!r}: old is needed, and missing")
        others.append(("old", old))
    options = VocabParallelOptions(tp_group, temperature, inplace_backward, block_bytes, vocab_size)
    sources = [source := rows_of(student, rows, options, "student")]
    for name, logits in others:
        if isinstance(logits, Tensor) and logits.requires_grad:
            logits = logits.detach()
        other = rows_of(logits, None, options, name)
        fits = other.width == source.width or (vocab_size is not None and options.tp_size == 1)
        if other.n != source.n or other.device != source.device or not fits:
            raise InvalidInputError(
                f"{name} is {list(logits.shape)} on {logits.device}, expected {source.n} rows of "
                f"{source.width} logits on {source.device}, as the student has; logits that are padded to "
                "another width need vocab_size, and under tensor parallelism OutputHead.resharded, too"
            )
        # Every tensor without elements is at address 0.
        existing = [x.logits for x in (other, source) if isinstance(x, SelectedRows) and x.logits.numel()]
        if inplace_backward and len({x.untyped_storage().data_ptr() for x in existing}) < len(existing):
            problem = f"{name} is in the memory of the student's logits, which inplace_backward overwrites"
            raise InvalidInputError(f"{problem}: pass a copy, or inplace_backward=False")
        sources.append(other)
    (values,) = FullDivergence(measure, tuple(math.log(weight) for weight, _ in counted))(*sources)
    return values


# --- weights of teachers


def weighted(teachers: Sequence[T], weights: Sequence[float] | None) -> list[tuple[float, T]]:
    """Return teachers and weights, which add up to one, without those of weight zero, which may hold NaN."""
    pairs = zip(normalize_weights(weights, len(teachers)), teachers, strict=True)
    return [(weight, teacher) for weight, teacher in pairs if weight]


def normalize_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    """Return ``count`` weights that add up to one, the same for all if ``weights`` is ``None``."""
    if count == 0:
        raise InvalidInputError("there are no teachers; pass at least one")
    numbers = (1.0,) * count if weights is None else check_weights(weights)
    if len(numbers) != count:
        raise InvalidInputError(f"teacher_weights are {weights} for {count} teacher(s), expected one each")
    return [weight / sum(numbers) for weight in numbers]


def check_weights(weights: Any) -> tuple[float, ...]:
    """Return the weights of a mixture, which may be an array or a tensor ``[teachers]``."""
    is_list = isinstance(weights, Sequence) or getattr(weights, "ndim", 0) == 1
    if is_list and len(weights) and all(map(is_number, weights)):
        numbers = tuple(map(float, weights))
        if min(numbers) >= 0 and 0 < sum(numbers) < math.inf:
            return numbers
    expected = "a list of numbers, one for each teacher, not negative, not all zero"
    raise InvalidInputError(f"teacher_weights are {weights!r}, expected {expected}")


# --- the loss


class _Sides(NamedTuple):
    """Arguments of the block functions beside the logits of student, teachers and old policy, the "sides"."""

    divergence: Divergence
    log_weights: tuple[Tensor | float, ...]  # of the teachers' mixture
    # What the logits of each side are divided by, or all; tensors without dimensions, or None for 1.
    scales: list[Tensor | None]
    dtype: torch.dtype  # of the computation

    @property
    def scale(self) -> Tensor | None:
        """The divisor that all sides share, which :func:`_prepared` leaves to later; ``None`` for none."""
        return self.scales[0] if len(self.scales) == 1 else None

    def row_values(self, normalizers: Tensor, *others: Tensor) -> Tensor:
        """Stack normalizers and ``others``, ``[n]`` each, to the ``[any, n, 1]`` of :func:`_compared`."""
        normalizer_values = torch.stack(Normalizer.of(normalizers, self.dtype, self.scale), 1).flatten(0, 1)
        return torch.cat([normalizer_values, *(values.to(self.dtype)[None, :, None] for values in others)])


class FullDivergence(Loss):
    """The divergence ``[n]`` of a student from its teachers; the old policy may be the last source."""

    def __init__(self, divergence: Divergence, log_weights: tuple[float, ...]) -> None:
        self.divergence, self.log_weights = divergence, log_weights
        teachers = [f"teacher {number}" for number in range(len(log_weights))]
        self.owners = [*teachers, "the old policy"] if divergence.needs_old else teachers
        self.masks_ruled_out = False  # whether ids that the student rules out have no gradient

    def forward(self, sources: Sequence[Source], tensors: Tensors, read: Read) -> Results:
        (sides, call), divergence, in_one_pass = self._call(sources), self.divergence, False
        if divergence.needs_normalizers or len(self.log_weights) > 1:
            normalizers = read(
                _normalizers, call, lambda parts: torch.stack(parts).logsumexp(0), _BLOCKS, keeps_tiles=False
            )
        else:

            def merge(parts: list[Tensor]) -> Tensor:
                return _chain_rule(divergence, torch.stack(parts, 2).unbind())

            parts = read(_conditional_parts, call, merge, _BLOCKS)
            normalizers, (value, expected) = parts[:-2], parts[-2:]
            in_one_pass = not (value == _INF).any()
        if not in_one_pass:
            part = partial(call, row_values=sides.row_values(normalizers))
            value, expected, *lost = read(_sums, part, lambda parts: torch.stack(parts).sum(0), _BLOCKS)
            value = divergence.without_rounding(value, expected - lost[0] if lost else expected)
        # Next to a distribution that rules every column out, nothing is a number.
        are_numbers = (normalizers != _MINUS_INF).all(0)
        value, expected = (total.where(are_numbers, torch.nan) for total in (value, expected))
        self.masks_ruled_out = divergence.covers_mass and not in_one_pass
        return [value.to(sides.dtype)], {"normalizers": normalizers, "expected": expected}

    def writer(self, sources: Sequence[Source], saved: Tensors, *gradients: Tensor | None) -> Writer:
        (gradient,), (sides, call) = gradients, self._call(sources)
        assert gradient is not None
        weights = gradient / sources[0].options.scale
        row_values = sides.row_values(saved["normalizers"], saved["expected"], weights)

        def write(block: Block) -> None:
            call(block, row_values, self.masks_ruled_out, block.out)

        return Writer(_block_derivative, write, _BLOCKS)

    def _call(self, sources: Sequence[Source]) -> tuple[_Sides, Callable[..., Any]]:
        """Return what functions of a block get, and what calls them."""
        student, divisors = sources[0], [source.options.scale for source in sources]
        divisors = divisors[:1] if len(set(divisors)) == 1 else divisors
        scales = [None if number == 1 else student.scalar(number) for number in divisors]
        sides = _Sides(self.divergence, self.log_weights, scales, student.dtype)

        @cache
        def with_tensors() -> _Sides:
            """Return the same for a compiled function, which would be compiled again for each number."""
            beta, *log_weights = map(student.scalar, (float(self.divergence.beta), *self.log_weights))
            return sides._replace(divergence=type(self.divergence)(beta), log_weights=tuple(log_weights))

        def call(block: Block, row_values: Tensor | None = None, *more: Any) -> Any:
            block_values = None if row_values is None else row_values[:, block.rows]
            if block.work is not None:
                return block.function(block.xs, sides, block_values, *more)
            block_values = None if block_values is None else block.cut(block_values)
            return block.function(block.xs, with_tensors(), block_values, *more)

        return sides, call


# --- functions of a block


def _normalizers(xs: list[Tensor], sides: _Sides, _: None) -> Tensor:
    """Return the logarithms of the sums of ``exp(x)``, float64 ``[m, b]``; -inf where no column counts."""
    values = torch.stack([log_sum_exp(x, sides.scale) for x in _prepared(xs, sides)])
    return values if values.dim() == 2 else values.logsumexp(2)


def _conditional_parts(xs: list[Tensor], sides: _Sides, _: None) -> Tensor:
    """Return what one pass computes of a block, ``[m + 2, b]``.

    These are the logarithms of the masses of student, teacher and perhaps old policy, and the two sums of
    :meth:`.Divergence.terms` for the conditional distributions. The first sum is inf if some of them rule
    columns out that others do not.
    """
    divergence, xs, scale = sides.divergence, _prepared(xs, sides), sides.scale
    masses = [log_sum_exp(x, scale) for x in xs]
    compared = Compared(xs, [Normalizer.of(mass, sides.dtype, scale) for mass in masses], scale=scale)
    value, expected = map(sum_of_rows, divergence.terms(compared))
    value = divergence.without_rounding(value, expected)
    parts = [*masses, value.masked_fill(_differ(compared), _INF), expected]
    return torch.stack(parts) if value.dim() == 1 else _chain_rule(divergence, parts)


def _chain_rule(divergence: Divergence, parts: Sequence[Tensor]) -> Tensor:
    """Return the same of whole rows, ``[m + 2, n]``, from that of their parts, ``[n, parts]`` each."""
    *masses, values, expected = parts
    differ = values == _INF
    totals = [mass.logsumexp(1) for mass in masses]
    compared = Compared(masses, [Normalizer.of(total, total.dtype) for total in totals])
    weights, (mass_value, mass_expected) = divergence.weights(compared), divergence.terms(compared)
    value = (weights * values.masked_fill(differ, 0.0) + mass_value).sum(1)
    value = value.masked_fill(differ.any(1) | _differ(compared), _INF)
    return torch.stack([*totals, value, (weights * expected + mass_expected).sum(1)])


def _differ(compared: Compared) -> Tensor:
    """Return whether some distributions rule columns or parts out that others do not, ``[...]``."""
    largest = compared.gap.abs().amax(-1)
    if compared.old_gap is not None:
        largest = torch.maximum(largest, compared.old_gap.abs().amax(-1))
    return largest > _FAR


def _sums(xs: list[Tensor], sides: _Sides, row_values: Tensor) -> Tensor:
    """Return the sums of :meth:`.Divergence.terms` over a block's columns; its normalizers are known.

    For a divergence that covers mass, the third sum is the teacher's probability of what the student rules
    out. These columns are constant, so the second sum is without them.
    """
    compared = _compared(xs, sides, row_values)
    terms = list(sides.divergence.terms(compared))
    if sides.divergence.covers_mass:
        are_constant = compared.are_ruled_out
        # terms[1] is p - q too. It is the difference of terms that grow with the gap, and loses digits.
        exact = torch.where(compared.gap < -_LARGE, compared.p - compared.q, terms[1])
        terms[1] = exact.masked_fill(are_constant, 0.0)
        terms.append(compared.q * are_constant)
    values = torch.stack([sum_of_rows(term) for term in terms])
    return values if values.dim() == 2 else values.sum(2)


def _block_derivative(
    xs: list[Tensor], sides: _Sides, row_values: Tensor, masks_ruled_out: bool, out: Tensor
) -> None:
    """Write the gradient of the student's logits into ``out``; ``row_values`` end with sums and weights."""
    compared, expected, weight = _compared(xs, sides, row_values), row_values[-2], row_values[-1]
    derivative = sides.divergence.derivative(compared, expected)
    if masks_ruled_out:
        derivative = derivative.masked_fill(compared.are_ruled_out & ~expected.isnan(), 0.0)
    # Rows that a loss mask leaves out may hold NaN, and zero times NaN is NaN.
    out.copy_(torch.where(weight == 0, 0.0, weight * derivative))


def _prepared(xs: list[Tensor], sides: _Sides) -> list[Tensor]:
    xs = [x.to(sides.dtype) for x in xs]
    if len(sides.scales) == 1:
        return xs
    return [x if scale is None else x / scale for x, scale in zip(xs, sides.scales, strict=True)]


def _compared(xs: list[Tensor], sides: _Sides, row_values: Tensor) -> Compared:
    """Compare all sides, whose normalizers, three values each, are the first of ``row_values``."""
    normalizers = [Normalizer(*row_values[first : first + 3]) for first in range(0, 3 * len(xs), 3)]
    return Compared(_prepared(xs, sides), normalizers, sides.log_weights, sides.scale)
