"""The divergence of two distributions over the whole vocabulary, of logits that need not exist.

Student, teachers and old policy are read in tiles, the same rows and columns of each at a time.

A Kullback-Leibler divergence takes one pass. The columns of a tile have conditional distributions ``p_i`` and
``q_i``, whose normalizers are those of the tile alone, and masses ``P_i`` and ``Q_i``. By the chain rule of
relative entropy, which holds for tiles and for tensor-parallel ranks alike::

    KL(p, q) = sum of P_i KL(p_i, q_i) + KL(P, Q)

The Jensen-Shannon divergence, and a mixture of teachers, need the normalizers of the whole vocabulary first.
They take a second pass and a second collective. So does a divergence where one distribution rules a column
out that another does not: what that costs cannot be said of a part alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from typing import NamedTuple

import torch
from torch import Tensor

from .autograd import LogitFunction, Tensors, all_gather
from .divergences import RULED_OUT, Compared, Divergence
from .overwriting import StorageClaim
from .rows import Inputs, LogitSource, SelectedRows, Tile, reduced, shifted
from .softmax import exp, stretches
from .tiles import OutputLayerRows

_MINUS_INF = float("-inf")
# The functions of a divergence have eight tensors of a block's size at once. A block is as large as if they
# had two: measured, smaller blocks cost more in calls than a larger cache saves.
_BUFFERS = 2

#: Restores the rows of a teacher or of the old policy from so many saved tensors.
_Restore = tuple[Callable[..., LogitSource], int]


class DivergenceOptions(NamedTuple):
    """What is computed.

    Attributes:
        log_weights: logarithms of the weights of the teachers' mixture, which add up to one.
        num_ids: size of the vocabulary; columns from there on count for nothing.
    """

    divergence: Divergence
    log_weights: tuple[float, ...]
    num_ids: int

    @property
    def needs_normalizers(self) -> bool:
        """Whether a tile's part depends on the normalizers of the whole vocabulary."""
        return self.divergence.needs_normalizers or len(self.log_weights) > 1


def divergence_of(student: LogitSource, others: Sequence[LogitSource], options: DivergenceOptions) -> Tensor:
    """Return the divergence ``[n]`` of the student from the teachers, which come first of ``others``.

    The old policy is the last of them, if the divergence needs one. All have the same ``n`` rows.
    """
    tensors: Tensors = {}
    restores: list[_Restore] = []
    for number, other in enumerate(others):
        of_other, restore = other.saved()
        of_whom = f"teacher {number}" if number < len(options.log_weights) else "the old policy"
        tensors |= {f"{name} of {of_whom}": tensor for name, tensor in of_other.items()}
        restores.append((restore, len(of_other)))
    function = _FullDivergence(student.claim(), restores, options)
    (divergence,) = function.apply(student, **tensors)
    return divergence


@dataclass(eq=False)
class _FullDivergence(LogitFunction):
    """The divergence ``[n]`` of a student from its teachers, see :func:`divergence_of`.

    Attributes:
        masks_ruled_out: whether ids that the student rules out have no gradient; forward sets it.
    """

    claim: StorageClaim
    restores: Sequence[_Restore]
    options: DivergenceOptions
    masks_ruled_out: bool = False

    def forward(self, source: LogitSource, tensors: Tensors) -> tuple[list[Tensor], Tensors]:
        pairs, options, divergence = self._pairs(source, tensors), self.options, self.options.divergence
        in_one_pass = False
        if options.needs_normalizers:
            first_pass = pairs._replace(student=source.keeping_tiles(False))
            normalizers = _reduced(first_pass, _normalizers, _add_exp, self.claim)
        else:
            of_block, merge = partial(_conditional_parts, divergence), partial(_chain_rule, divergence)
            parts = _reduced(pairs, of_block, merge, self.claim)
            normalizers, (value, expected, differ) = parts[:-3], parts[-3:]
            in_one_pass = not differ.any()
        if not in_one_pass:
            value, expected, *lost = _reduced(pairs, partial(_sums, normalizers, options), _add)
            value = divergence.without_rounding(value, expected)
            expected = expected + lost[0] if lost else expected
        # Next to a distribution that rules every column out, nothing is a number.
        are_numbers = (normalizers != _MINUS_INF).all(0)
        value, expected = (total.where(are_numbers, torch.nan) for total in (value, expected))
        self.masks_ruled_out = divergence.covers_mass and not in_one_pass
        return [value.to(source.dtype)], {"normalizers": normalizers, "expected": expected, **tensors}

    def gradients(
        self, source: LogitSource, saved: Tensors, needed: Sequence[bool], *gradients: Tensor | None
    ) -> Inputs:
        (gradient,), options = gradients, self.options
        assert gradient is not None
        normalizers, expected = saved.pop("normalizers"), saved.pop("expected")
        pairs = self._pairs(source, saved)
        weights = (gradient / source.options.temperature)[:, None]

        def of_tile(tile: Tile, in_place: bool) -> Tensor:
            result = tile.logits.new_gradient(in_place)
            for block in pairs.blocks(tile):
                weight = weights[block.rows]
                compared = Compared.of(block.xs, normalizers[:, block.rows], options.log_weights)
                expected_n1 = expected[block.rows, None].to(source.dtype)
                derivative = options.divergence.derivative(compared, expected_n1)
                if self.masks_ruled_out:
                    is_constant = compared.student.are_ruled_out & ~expected_n1.isnan()
                    derivative = derivative.masked_fill(is_constant, 0.0)
                # Rows that a loss mask leaves out may hold NaN, and zero times NaN is NaN.
                values = torch.where(weight == 0, 0.0, weight * derivative)
                block.read_from.write(result[:, block.columns], block.place, values)
            return result

        return source.gradients(of_tile, needed)

    def _pairs(self, source: LogitSource, tensors: Tensors) -> _Pairs:
        remaining = iter(tensors.values())
        others = [restore(*islice(remaining, n)) for restore, n in self.restores]
        return _Pairs(source, others, self.options)


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

    student: LogitSource
    others: Sequence[LogitSource]
    options: DivergenceOptions

    def blocks(self, tile: Tile) -> Iterator[_Block]:
        """Yield the blocks of a tile of the student; each has all columns of a part of the tile."""
        row_ranges, column_ranges = self._parts(tile)
        widest = column_ranges[0].stop
        for rows, columns in product(row_ranges, column_ranges):
            part = tile.logits.of(rows, columns)
            whole = shifted(rows, tile.rows.start), shifted(columns, tile.columns.start)
            others = [other.part(*whole) for other in self.others]
            # Blocks of the same rows are alike in all parts, also in the last one, which may be narrower.
            for place in part.blocks(_BUFFERS, widest) or [slice(0, 0)]:
                read = [part.read(place, None), *(x[place] for x in others)]
                sources = self.student, *self.others
                xs = [self._prepared(x, whole[1], of) for x, of in zip(read, sources, strict=True)]
                yield _Block(xs, shifted(place, whole[0].start), columns, part, place)

    def _parts(self, tile: Tile) -> tuple[list[slice], list[slice]]:
        """Return rows and columns of a tile: all, or where it is large those of a tile of the others."""
        rows, columns = [slice(0, tile.logits.n)], [slice(0, tile.columns.stop - tile.columns.start)]
        layers = [other for other in self.others if isinstance(other, OutputLayerRows)]
        is_cut = isinstance(self.student, OutputLayerRows)
        if limiting := [layer for layer in layers if layer.is_elsewhere or not is_cut]:
            widest = max(limiting, key=lambda layer: layer.weight.shape[1])
            rows, columns = widest.sharing(len(layers)).cut(tile.logits.n, columns[0].stop)
        return rows, columns

    def _prepared(self, x: Tensor, columns: slice, source: LogitSource) -> Tensor:
        student, temperature = self.student, source.options.temperature
        counting = self.options.num_ids - student.options.tp_rank * student.width - columns.start
        width = columns.stop - columns.start
        x = x.to(student.dtype)
        if temperature != 1:
            x = x / temperature
        if counting < width or x.shape[1] < width:
            counting = max(min(counting, x.shape[1]), 0)
            filler = x.new_full((len(x), width - counting), _MINUS_INF)
            x = torch.cat([x[:, :counting], filler], 1)
        return x


def _reduced(
    pairs: _Pairs,
    of_block: Callable[[_Block], Tensor],
    merge: Callable[[Sequence[Tensor]], Tensor],
    claim: StorageClaim | None = None,
) -> Tensor:
    """Return values over all columns of all ranks, float64 ``[m, n]``, from those of blocks, ``[m, b]``."""

    def of_tiles() -> Iterator[tuple[slice, Tensor]]:
        for tile in pairs.student.tiles():
            yield tile.rows, reduced(((b.rows, of_block(b)) for b in pairs.blocks(tile)), merge)

    return merge(all_gather(reduced(of_tiles(), merge), pairs.student.options.tp_group, claim).unbind())


# --- parts of the divergence


def _normalizers(block: _Block) -> Tensor:
    """Return the logarithms of the sums of ``exp(x)``, float64 ``[m, b]``; -inf where no column counts."""
    return torch.stack([_log_sum_exp(x) for x in block.xs])


def _log_sum_exp(x: Tensor) -> Tensor:
    largest = x.amax(1)
    reference = largest.where(largest != _MINUS_INF, 0.0)
    return reference.double() + _sum(exp(x - reference[:, None])).log()


def _conditional_parts(divergence: Divergence, block: _Block) -> Tensor:
    """Return what one pass computes of a block: ``[m + 3, b]``, see :func:`_chain_rule`.

    These are the logarithms of the masses of student, teacher and perhaps old policy, the two sums of
    :meth:`.Divergence.terms` for the conditional distributions, and whether some of them rule a column out
    that others do not.
    """
    masses = _normalizers(block)
    compared = Compared.of(block.xs, masses)
    gaps = [compared.gap] if compared.old_gap is None else [compared.gap, compared.old_gap]
    # Where one of them rules a column out, the gap is next to RULED_OUT.
    differ = torch.stack([gap.abs().amax(1) for gap in gaps]).amax(0) > -0.5 * RULED_OUT
    value, expected = map(_sum, divergence.terms(compared))
    value = divergence.without_rounding(value, expected)
    return torch.cat([masses, torch.stack([value, expected, differ.double()])])


def _chain_rule(divergence: Divergence, parts: Sequence[Tensor]) -> Tensor:
    """Return the same of all columns from those of blocks, tiles or ranks."""
    *masses, values, expected, differ = torch.stack(list(parts)).unbind(1)
    totals = torch.stack([mass.logsumexp(0) for mass in masses])
    compared = Compared.of([mass.T for mass in masses], totals)
    weights, (of_value, of_expected) = divergence.weights(compared), divergence.terms(compared)
    value = (weights * values.T + of_value).sum(1)
    expected = (weights * expected.T + of_expected).sum(1)
    return torch.cat([totals, torch.stack([value, expected, differ.amax(0)])])


def _sums(normalizers: Tensor, options: DivergenceOptions, block: _Block) -> Tensor:
    """Return the sums of :meth:`.Divergence.terms` over a block's columns; normalizers ``[m, n]`` are known.

    For a divergence that covers mass, the teacher's probability of what the student rules out is the third
    sum. The second one holds it, and the derivative of these columns, which are constant, does not.
    """
    compared = Compared.of(block.xs, normalizers[:, block.rows], options.log_weights)
    sums = [_sum(term) for term in options.divergence.terms(compared)]
    if options.divergence.covers_mass:
        sums.append(_sum(compared.q * compared.student.are_ruled_out))
    return torch.stack(sums)


def _sum(x: Tensor) -> Tensor:
    return stretches(x).sum(2).sum(1, dtype=torch.float64)


def _add_exp(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).logsumexp(0)


def _add(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)
