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

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .autograd import gradients_of_inputs, save_source, without_autocast
from .collectives import all_gather
from .divergences import RULED_OUT, Compared, Divergence
from .head import HeadLogits
from .overwriting import StorageClaim
from .rows import Inputs, LogitSource, SelectedRows, Tile, reduced
from .softmax import exp, stretches

_MINUS_INF = float("-inf")
# The functions of a divergence have eight tensors of a block's size at once. A block is as large as if they
# had two: measured, smaller blocks cost more in calls than a larger cache saves.
_BUFFERS = 2

Gather = Callable[[Tensor, "dist.ProcessGroup | None"], Tensor]


class Logits(NamedTuple):
    """Logits that are read, and the number that they are divided by."""

    source: LogitSource
    temperature: float


class DivergenceOptions(NamedTuple):
    """What is computed.

    Attributes:
        log_weights: logarithms of the weights of the teachers' mixture, which add up to one.
        num_ids: size of the vocabulary; columns from there on count for nothing.
        tp_group: ranks that hold the other columns.
    """

    divergence: Divergence
    log_weights: tuple[float, ...]
    num_ids: int
    tp_group: dist.ProcessGroup | None

    @property
    def needs_normalizers(self) -> bool:
        """Whether a tile's part depends on the normalizers of the whole vocabulary."""
        return self.divergence.needs_normalizers or len(self.log_weights) > 1


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
    @without_autocast
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
        in_one_pass = False
        if options.needs_normalizers:
            first_pass = pairs.without_kept_tiles()
            normalizers = _reduced(first_pass, _normalizers, _add_exp, claim.gather)
        else:
            chain = _ChainRule(options)
            parts = _reduced(pairs, chain.of_block, chain.merge, claim.gather)
            normalizers, value, expected, in_one_pass = parts[:-3], parts[-3], parts[-2], not parts[-1].any()
        if not in_one_pass:
            value, expected, *lost = _reduced(pairs, _Sums(normalizers, options).of_block, _add, all_gather)
            value = options.divergence.without_rounding(value, expected)
            expected = expected + lost[0] if lost else expected
        # Next to a distribution that rules every column out, nothing is a number.
        are_numbers = (normalizers != _MINUS_INF).all(0)
        value, expected = (total.where(are_numbers, torch.nan) for total in (value, expected))

        ctx.options, ctx.temperature, ctx.claim, ctx.others = options, temperature, claim, []
        ctx.masks_ruled_out = options.divergence.covers_mass and not in_one_pass
        tensors: dict[str, Tensor | None] = {"normalizers": normalizers, "expected": expected}
        for number, other in enumerate(others):
            of_other, restore = other.source.saved()
            ctx.others.append((restore, other.temperature, len(of_other)))
            of_whom = f"teacher {number}" if number < len(options.log_weights) else "the old policy"
            tensors |= {f"{name} of {of_whom}": tensor for name, tensor in of_other.items()}
        save_source(ctx, source, tensors)
        return value.to(source.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        return (None,) * 5 + gradients_of_inputs(ctx, _gradients, gradient)


def _gradients(ctx: Any, source: LogitSource, saved: dict[str, Any], gradient: Tensor) -> Inputs:
    normalizers, expected, *tensors = saved.values()
    remaining, others = iter(tensors), []
    for restore, temperature, count in ctx.others:
        others.append(Logits(restore(*itertools.islice(remaining, count)), temperature))
    pairs = _Pairs(Logits(source, ctx.temperature), tuple(others), ctx.options)
    weights = (gradient / ctx.temperature)[:, None]

    def of_tile(tile: Tile, in_place: bool) -> Tensor:
        result = tile.logits.new_gradient(in_place)
        for block in pairs.blocks(tile):
            weight = weights[block.rows]
            compared = Compared.of(block.xs, normalizers[:, block.rows], ctx.options.log_weights)
            expected_n1 = expected[block.rows, None].to(source.dtype)
            derivative = ctx.options.divergence.derivative(compared, expected_n1)
            if ctx.masks_ruled_out:
                is_constant = compared.student.are_ruled_out & ~expected_n1.isnan()
                derivative = derivative.masked_fill(is_constant, 0.0)
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
        row_ranges, column_ranges = self._parts(tile)
        widest = column_ranges[0].stop
        for rows, columns in itertools.product(row_ranges, column_ranges):
            index = tile.logits.index
            part = replace(
                tile.logits,
                logits=tile.logits.logits[:, columns],
                index=_shifted(rows, index.start) if isinstance(index, slice) else index[rows],
            )
            whole = _shifted(rows, tile.rows.start), _shifted(columns, tile.columns.start)
            others = [(other.source.part(*whole), other.temperature) for other in self.others]
            # Blocks of the same rows are alike in all parts, also in the last one, which may be narrower.
            for place in part.blocks(_BUFFERS, widest) or [slice(0, 0)]:
                read = [(part.read(place, None), self.student.temperature)]
                read += [(x[place], temperature) for x, temperature in others]
                xs = [self._prepared(x, whole[1], temperature, dtype) for x, temperature in read]
                yield _Block(xs, _shifted(place, whole[0].start), columns, part, place)

    def _parts(self, tile: Tile) -> tuple[list[slice], list[slice]]:
        """Return rows and columns of a tile: all, or where it is large those of a tile of the others."""
        rows, columns = [slice(0, tile.logits.n)], [slice(0, tile.columns.stop - tile.columns.start)]
        heads = [other.source for other in self.others if isinstance(other.source, HeadLogits)]
        is_cut = isinstance(self.student.source, HeadLogits)
        if limiting := [head for head in heads if head.is_elsewhere or not is_cut]:
            widest = max(limiting, key=lambda head: head.weight.shape[1])
            rows, columns = widest.sharing(len(heads)).cut(tile.logits.n, columns[0].stop)
        return rows, columns

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


def _reduced(
    pairs: _Pairs,
    of_block: Callable[[_Block], Tensor],
    merge: Callable[[Sequence[Tensor]], Tensor],
    gather: Gather,
) -> Tensor:
    """Return values over all columns of all ranks, float64 ``[m, n]``, from those of blocks, ``[m, b]``."""

    def of_tiles() -> Iterator[tuple[slice, Tensor]]:
        for tile in pairs.student.source.tiles():
            yield tile.rows, reduced(((b.rows, of_block(b)) for b in pairs.blocks(tile)), merge)

    return merge(gather(reduced(of_tiles(), merge), pairs.options.tp_group).unbind())


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
    :meth:`.Divergence.terms` for the conditional distributions, and whether some of them rule a column out
    that others do not.
    """

    def __init__(self, options: DivergenceOptions) -> None:
        self._divergence = options.divergence

    def of_block(self, block: _Block) -> Tensor:
        masses = _normalizers(block)
        compared = Compared.of(block.xs, masses)
        gaps = [compared.gap] if compared.old_gap is None else [compared.gap, compared.old_gap]
        # Where one of them rules a column out, the gap is next to RULED_OUT.
        differ = torch.stack([gap.abs().amax(1) for gap in gaps]).amax(0) > -0.5 * RULED_OUT
        value, expected = map(_sum, self._divergence.terms(compared))
        value = self._divergence.without_rounding(value, expected)
        return torch.cat([masses, torch.stack([value, expected, differ.double()])])

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the parts of all columns from those of tiles or ranks."""
        *masses, values, expected, differ = torch.stack(list(parts)).unbind(1)
        totals = torch.stack([mass.logsumexp(0) for mass in masses])
        compared = Compared.of([mass.T for mass in masses], totals)
        weights, between = self._divergence.weights(compared), self._divergence.terms(compared)
        sums = [
            (weights * part.T + term).sum(1) for part, term in zip((values, expected), between, strict=True)
        ]
        return torch.cat([totals, torch.stack(sums), differ.amax(0)[None]])


class _Sums:
    """The sums over all columns of :meth:`.Divergence.terms` when the normalizers ``[m, n]`` are known.

    For a divergence that covers mass, the teacher's probability of what the student rules out is the third
    sum. The second one holds it, and the derivative of these columns, which are constant, does not.
    """

    def __init__(self, normalizers: Tensor, options: DivergenceOptions) -> None:
        self._normalizers, self._options = normalizers, options

    def of_block(self, block: _Block) -> Tensor:
        compared = Compared.of(block.xs, self._normalizers[:, block.rows], self._options.log_weights)
        sums = [_sum(term) for term in self._options.divergence.terms(compared)]
        if self._options.divergence.covers_mass:
            sums.append(_sum(compared.q * compared.student.are_ruled_out))
        return torch.stack(sums)


def _sum(x: Tensor) -> Tensor:
    return stretches(x).sum(2).sum(1, dtype=torch.float64)


def _add_exp(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).logsumexp(0)


def _add(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)


def _shifted(part: slice, start: int) -> slice:
    return slice(part.start + start, part.stop + start)
