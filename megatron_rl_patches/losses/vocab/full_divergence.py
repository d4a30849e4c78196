"""The divergence of two distributions over the whole vocabulary, of logits that need not exist.

Student, teachers and old policy are read in tiles, the same rows and columns of each at a time.

A Kullback-Leibler divergence takes one pass. The columns of a tile have conditional distributions ``p_i`` and
``q_i``, whose normalizers are those of the tile alone, and masses ``P_i`` and ``Q_i``. By the chain rule of
relative entropy, which holds for tiles and for tensor-parallel ranks alike::

    KL(p, q) = sum of P_i KL(p_i, q_i) + KL(P, Q)

The Jensen-Shannon divergence, and a mixture of teachers, need the normalizers of the whole vocabulary first.
They take a second pass and a second collective. So does a divergence where one distribution gives an id, or
a block of ids, a probability of zero or nearly zero and another does not. What this adds is limited through
the log-probability of each id in the whole row (see RULED_OUT), which a part alone does not know.

For large logits this is compiled, with each stretch of columns as a part of its own: one kernel reads the
logits of all and computes what the stretches contribute, and another one puts these together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .divergences import Compared, Divergence, Normalizer
from .reduction import Block, Blocks, Loss, Writer
from .softmax import log_sum_exp, sum_of_rows
from .sources import Source, Tensors

_MINUS_INF, _INF = float("-inf"), float("inf")
# Where log-probabilities of a column, or of a block of columns, differ by more nats, one distribution gives
# it a probability of zero or nearly zero and another does not. RULED_OUT limits the log-probability of a
# column in its whole row. That is the sum of the log-probabilities of the column in its stretch, of the
# stretch in its tile, and so on. Each of these may be well above RULED_OUT, so this limit is a tenth of it.
_FAR = 1e3
# Where the teacher's log-probability exceeds the student's by more nats, the student's probability is less
# than a millionth of the teacher's, and subtracting one from the other costs no digits.
_LARGE = 16.0
# The functions of a divergence have eight tensors of a block's size at once. A block is as large as if they
# had two: measured, smaller blocks cost more in calls than a larger cache saves. What a compiled function
# keeps of each stretch takes 5% of a block.
_BLOCKS = Blocks(2, has_work=False, compiled=16)


class DivergenceOptions(NamedTuple):
    """What is computed.

    Attributes:
        log_weights: logarithms of the weights of the teachers' mixture, which add up to one.
    """

    divergence: Divergence
    log_weights: tuple[Tensor | float, ...]

    def as_tensors(self, like: Tensor) -> DivergenceOptions:
        """Return the same for a compiled function, which would be compiled again for each number."""
        numbers = map(float, (self.divergence.beta, *self.log_weights))
        beta, *log_weights = (like.new_full((), number) for number in numbers)
        return self._replace(divergence=type(self.divergence)(beta), log_weights=tuple(log_weights))

    @property
    def needs_normalizers(self) -> bool:
        """Whether a tile's part depends on the normalizers of the whole vocabulary."""
        return self.divergence.needs_normalizers or len(self.log_weights) > 1


class FullDivergence(Loss):
    """The divergence ``[n]`` of a student from its teachers.

    The sources are the student, the teachers, and the old policy, if the divergence needs one. All have the
    same ``n`` rows.
    """

    def __init__(self, options: DivergenceOptions) -> None:
        self.options = options
        self.masks_ruled_out = False  # whether ids that the student rules out have no gradient

    @property
    def owners(self) -> list[str]:
        """Whose the sources behind the first one are."""
        teachers = [f"teacher {number}" for number in range(len(self.options.log_weights))]
        return [*teachers, "the old policy"] if self.options.divergence.needs_old else teachers

    def forward(
        self, sources: Sequence[Source], tensors: Tensors, read: Callable[..., Tensor]
    ) -> tuple[list[Tensor], Tensors]:
        divergence, sides, in_one_pass = self.options.divergence, _Sides(sources, self.options), False
        if self.options.needs_normalizers:
            normalizers = read(_normalizers, sides.part(), _add_exp, _BLOCKS, keeps_tiles=False)
        else:

            def merge(parts: Sequence[Tensor]) -> Tensor:
                return _chain_rule(divergence, parts)

            parts = read(_conditional_parts, sides.part(), merge, _BLOCKS)
            normalizers, (value, expected) = parts[:-2], parts[-2:]
            in_one_pass = not (value == _INF).any()
        if not in_one_pass:
            value, expected, *lost = read(_sums, sides.part(normalizers), _add, _BLOCKS)
            value = divergence.without_rounding(value, expected - lost[0] if lost else expected)
        # Next to a distribution that rules every column out, nothing is a number.
        are_numbers = (normalizers != _MINUS_INF).all(0)
        value, expected = (total.where(are_numbers, torch.nan) for total in (value, expected))
        self.masks_ruled_out = divergence.covers_mass and not in_one_pass
        return [value.to(sources[0].dtype)], {"normalizers": normalizers, "expected": expected}

    def writer(self, sources: Sequence[Source], saved: Tensors, *gradients: Tensor | None) -> Writer:
        (gradient,) = gradients
        assert gradient is not None
        sides, expected = _Sides(sources, self.options), saved["expected"].to(sources[0].dtype)
        weights, of_all = (
            (gradient / sources[0].options.scale)[:, None],
            sides.normalizer(saved["normalizers"]),
        )

        def write(block: Block) -> None:
            of_rows = of_all.part(block.rows, block.cut), block.part(expected[:, None]), block.part(weights)
            block.function(block.xs, *sides.arguments(block), of_rows, self.masks_ruled_out, block.out)

        return Writer(_block_derivative, write, _BLOCKS)


class _Preparation(NamedTuple):
    """What becomes of logits before anything is computed.

    Attributes:
        scales: tensors without dimensions, or ``None`` for 1: what the logits of the student and of all
            others are divided by, or a single one that they have in common.
        dtype: the dtype of the computation.
    """

    scales: list[Tensor | None]
    dtype: torch.dtype


class _Sides:
    """What functions of a block get beside the logits of all sides."""

    def __init__(self, sources: Sequence[Source], options: DivergenceOptions) -> None:
        student, of_each = sources[0], [source.options.scale for source in sources]
        of_each = of_each[:1] if len(set(of_each)) == 1 else of_each
        scales = [None if number == 1 else student.scalar(number) for number in of_each]
        self._options, self._preparation = options, _Preparation(scales, student.dtype)
        self._device = student.device

    def arguments(self, block: Block) -> tuple[_Preparation, DivergenceOptions]:
        """Return how the logits are prepared, and the options."""
        return self._preparation, self._options if block.work is not None else self._as_tensors

    def normalizer(self, exact: Tensor) -> Normalizer:
        """Return what functions subtract from the logits of all, from normalizers ``[m, n]``."""
        return Normalizer.of(exact, self._preparation.dtype, _common_scale(self._preparation.scales))

    def part(self, normalizers: Tensor | None = None) -> Callable[[Block], Tensor]:
        """Return what computes the statistics of a block."""
        of_all = None if normalizers is None else self.normalizer(normalizers)

        def part(block: Block) -> Tensor:
            of_rows = None if of_all is None else of_all.part(block.rows, block.cut)
            values: Tensor = block.function(block.xs, *self.arguments(block), of_rows)
            return values

        return part

    @cached_property
    def _as_tensors(self) -> DivergenceOptions:
        return self._options.as_tensors(torch.empty(0, dtype=self._preparation.dtype, device=self._device))


# --- functions of a block


def _normalizers(xs: list[Tensor], preparation: _Preparation, *_: object) -> Tensor:
    """Return the logarithms of the sums of ``exp(x)``, float64 ``[m, b]``; -inf where no column counts."""
    xs, scale = _prepared(xs, preparation)
    values = torch.stack([log_sum_exp(x, scale) for x in xs])
    return values if values.dim() == 2 else values.logsumexp(2)


def _conditional_parts(
    xs: list[Tensor], preparation: _Preparation, options: DivergenceOptions, _: None
) -> Tensor:
    """Return what one pass computes of a block: ``[m + 2, b]``, see :func:`_chain_rule`.

    These are the logarithms of the masses of student, teacher and perhaps old policy, and the two sums of
    :meth:`.Divergence.terms` for the conditional distributions. The first sum is inf if some of them rule
    columns out that others do not.
    """
    divergence = options.divergence
    xs, scale = _prepared(xs, preparation)
    masses = [log_sum_exp(x, scale) for x in xs]
    of_each = [Normalizer.of(mass, xs[0].dtype, scale) for mass in masses]
    compared = Compared.between(xs, of_each, scale=scale)
    value, expected = map(sum_of_rows, divergence.terms(compared))
    value = divergence.without_rounding(value, expected)
    parts = [*masses, value.masked_fill(_differ(compared), _INF), expected]
    return torch.stack(parts if value.dim() == 1 else _whole(divergence, parts))


def _chain_rule(divergence: Divergence, parts: Sequence[Tensor]) -> Tensor:
    """Return the same of all columns from those of blocks, tiles or ranks, ``[m + 2, n]`` each."""
    return torch.stack(_whole(divergence, torch.stack(list(parts), 2).unbind()))


def _whole(divergence: Divergence, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the same of whole rows, ``[n]`` each, from that of their parts, ``[n, parts]`` each."""
    *masses, values, expected = parts
    differ = values == _INF
    totals = [mass.logsumexp(1) for mass in masses]
    compared = Compared.between(masses, [Normalizer.of(total, total.dtype) for total in totals])
    weights, (of_value, of_expected) = divergence.weights(compared), divergence.terms(compared)
    value = (weights * values.masked_fill(differ, 0.0) + of_value).sum(1)
    value = value.masked_fill(differ.any(1) | _differ(compared), _INF)
    return [*totals, value, (weights * expected + of_expected).sum(1)]


def _differ(compared: Compared) -> Tensor:
    """Return whether some distributions rule columns or parts out that others do not, ``[...]``."""
    largest = compared.gap.abs().amax(-1)
    if compared.old_gap is not None:
        largest = torch.maximum(largest, compared.old_gap.abs().amax(-1))
    return largest > _FAR


def _sums(
    xs: list[Tensor], preparation: _Preparation, options: DivergenceOptions, normalizer: Normalizer
) -> Tensor:
    """Return the sums of :meth:`.Divergence.terms` over a block's columns; its normalizer is known.

    For a divergence that covers mass, the teacher's probability of what the student rules out is the third
    sum. These columns are constant, so the second sum is without them.
    """
    divergence, (xs, scale) = options.divergence, _prepared(xs, preparation)
    compared = Compared.between(xs, normalizer.of_each(), options.log_weights, scale)
    terms = list(divergence.terms(compared))
    if divergence.covers_mass:
        are_constant = compared.student.are_ruled_out
        # terms[1] is p - q too. It is the difference of terms that grow with the gap, and loses digits.
        exact = torch.where(compared.gap < -_LARGE, compared.p - compared.q, terms[1])
        terms[1] = exact.masked_fill(are_constant, 0.0)
        terms.append(compared.q * are_constant)
    values = torch.stack([sum_of_rows(term) for term in terms])
    return values if values.dim() == 2 else values.sum(2)


def _block_derivative(
    xs: list[Tensor],
    preparation: _Preparation,
    options: DivergenceOptions,
    of_rows: tuple[Normalizer, Tensor, Tensor],
    masks_ruled_out: bool,
    out: Tensor,
) -> None:
    """Write the gradient of the student's logits into ``out``.

    Args:
        of_rows: the normalizer, the sums that derivatives subtract ``[b, 1]``, and the gradients of
            the divergences over the student's temperature ``[b, 1]``.
    """
    normalizer, expected, weight = of_rows
    xs, scale = _prepared(xs, preparation)
    compared = Compared.between(xs, normalizer.of_each(), options.log_weights, scale)
    derivative = options.divergence.derivative(compared, expected)
    if masks_ruled_out:
        is_constant = compared.student.are_ruled_out & ~expected.isnan()
        derivative = derivative.masked_fill(is_constant, 0.0)
    # Rows that a loss mask leaves out may hold NaN, and zero times NaN is NaN.
    out.copy_(torch.where(weight == 0, 0.0, weight * derivative))


def _prepared(xs: list[Tensor], preparation: _Preparation) -> tuple[list[Tensor], Tensor | None]:
    """Return the logits, and what remains to divide them by: divided here, they are rounded."""
    scales, dtype = preparation
    xs = [x.to(dtype) for x in xs]
    if len(scales) > 1:
        xs = [x if scale is None else x / scale for x, scale in zip(xs, scales, strict=True)]
    return xs, _common_scale(scales)


def _common_scale(scales: Sequence[Tensor | None]) -> Tensor | None:
    """Return the scale of all logits, or ``None`` where each side was divided by its own."""
    return scales[0] if len(scales) == 1 else None


# --- merging blocks, tiles and ranks


def _add_exp(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).logsumexp(0)


def _add(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)
