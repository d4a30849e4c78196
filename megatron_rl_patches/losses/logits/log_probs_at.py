"""Log-probabilities of given tokens of logits split over the vocabulary, and of all others together.

For logits ``x`` of a row, a temperature ``T`` and ids ``S``, with ``p = softmax(x / T)``::

    log_prob of id   = log p[id]                   d / dx = (onehot(id) - p) / T
    tail_log_prob    = log(sum of p outside S)     d / dx = (p / tail outside S - p) / T

The tail has a softmax of its own, see :mod:`.topk`. Tensor parallel ranks exchange what belongs to the ids
once; backward needs no collective, since a rank's gradient is the whole derivative by its own logits.

Elsewhere: slime#2033 sums log-probs with a collective that has no backward (right at TP 1 only); NeMo-RL has
no tail; OpenClaw-RL computes a cross entropy for each of k ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor

from .arguments import VocabParallelOptions, valid_indices
from .autograd import LogitFunction, Tensors, divisor_note, divisors_of
from .blocks import Block, each_block, stretches
from .distributions import NO_ENTRY
from .rows import Inputs, LogitSource, SelectedRows, Tile, rows_of
from .slices import Rows
from .softmax import NO_SOFTMAX, SoftmaxGradient, block_gradient, buffered_statistics
from .topk import blocks_of_rows, log_masses, merged_tail, total_and_tail

_MINUS_INF = float("-inf")


@overload
def vocab_parallel_log_probs_at(
    logits: Tensor,
    indices: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    rows: Rows = None,
    temperature: float = 1.0,
    with_tail: Literal[False] = False,
    inplace_backward: bool = False,
    block_bytes: int | None = None,
) -> Tensor: ...


@overload
def vocab_parallel_log_probs_at(
    logits: Tensor,
    indices: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    rows: Rows = None,
    temperature: float = 1.0,
    with_tail: Literal[True],
    inplace_backward: bool = False,
    block_bytes: int | None = None,
) -> tuple[Tensor, Tensor]: ...


def vocab_parallel_log_probs_at(
    logits: Tensor,
    indices: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    rows: Rows = None,
    temperature: float = 1.0,
    with_tail: bool = False,
    inplace_backward: bool = False,
    block_bytes: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return log-probabilities of given tokens of each selected row, and of all others together.

    The result is differentiable.
    For backward it keeps the logits themselves, the ids and a few numbers per row. Backward allocates the
    gradient and a block of rows, or with ``inplace_backward`` the block alone, whatever ``K`` is.

    Args:
        logits: ``[T, V / tp]``; ``tp_group``, ``rows``, ``temperature``, ``inplace_backward`` and
            ``block_bytes`` too are those of :func:`vocab_parallel_log_probs`.
        indices: token ids ``[n, K]`` in the whole vocabulary, of the selected rows, the same on all ranks. An
            id may occur twice in a row; its probability counts once. -100 is no id at all, so that rows of
            fewer can be filled up: log-probability -inf and no gradient.
        with_tail: also return the log-probability of the vocabulary without the ids. In float32 its relative
            error is below 5e-6, however small the tail is.

    Returns:
        ``[n, K]``, or this and ``[n]``, in float32 (float64 for float64 logits), the same bits on all ranks
        of ``tp_group``. A tail without any token is -inf and has no gradient. NaN and +inf make NaN of their
        row, its tail included.

    Raises:
        InvalidInputError: arguments do not fit; raised on every rank alike and before the one collective (an
            all-reduce of ``K + 2 * tp`` numbers per row, and two per rank), except that refusals of
            ``inplace_backward`` travel with it, see :func:`vocab_parallel_log_probs`. On a GPU the *values*
            of ``indices`` and ``rows`` are checked by the device. In backward: the logits were overwritten
            since forward.
    """
    options = VocabParallelOptions(
        tp_group, temperature, inplace_backward, block_bytes, ignore_index=NO_ENTRY
    )
    source = rows_of(logits, rows, options)
    indices = valid_indices(indices, source)
    log_probs, log_tail = _LogProbsAt(source.claim()).apply(source, indices=indices)
    return (log_probs, log_tail) if with_tail else log_probs


class _LogProbsAt(LogitFunction):
    """Log-probabilities at ids ``[n, K]``, negative for none, and of the tail."""

    def forward(self, source: LogitSource, tensors: Tensors) -> tuple[list[Tensor], Tensors]:
        indices, options = tensors["indices"], source.options
        ids = _Ids(indices, options.tp_rank * source.width)
        local = source.reduce(partial(_statistics, ids), partial(_merged, options.scale))
        # Until the loop, log_probs holds the logits at the ids.
        log_probs = local[:-2].T.clone(memory_format=torch.contiguous_format)
        local_tail = local[-2:].clone()
        tail, divisors = self._sum_over_ranks(log_probs, local_tail, options)
        log_sum_exp = tail.new_empty(source.n, dtype=torch.float64)
        max_logit, log_tail, tail_max_weight = (torch.empty_like(log_sum_exp) for _ in range(3))
        for block in blocks_of_rows(log_probs, indices.shape[1], options):
            tails = tail[:, :, block].double()
            tails[:, 0] /= divisors[:, None]
            at_ids = log_probs[block].double() / divisors[indices[block].clamp(min=0) // source.width]
            at_ids.masked_fill_(indices[block] < 0, _MINUS_INF)
            highest = torch.maximum(at_ids.amax(1), tails[:, 0].amax(0))[:, None]
            z = (at_ids - highest) / options.temperature
            inside = z.masked_fill(_repeated_or_none(indices[block]), _MINUS_INF)
            outside = log_masses(tails.unbind(1), highest, options.temperature)
            total, log_tail[block] = total_and_tail(inside, outside)
            # Backward compares with the logits that this rank reads.
            max_logit[block], log_sum_exp[block] = highest.squeeze(1) * options.divisor, total.squeeze(1)
            tail_max_weight[block] = _weight_in_tail(tails, options)
            log_probs[block] = (z - total).masked_fill(indices[block] < 0, _MINUS_INF)
        of_rows = {
            "tail_max": local_tail[0],
            "tail_max_weight": tail_max_weight,
            "max_logit": max_logit,
            "log_sum_exp": log_sum_exp,
            "log_tail": log_tail,
        }
        # The caller may change the returned tensors, so none of them is a saved tensor.
        return [log_probs, log_tail.to(source.dtype, copy=True)], {"indices": indices, **of_rows}

    def gradients(
        self, source: LogitSource, saved: Tensors, needed: Sequence[bool], *gradients: Tensor | None
    ) -> Inputs:
        indices, log_tail, options = saved.pop("indices"), saved["log_tail"], source.options
        grad_log_probs, grad_log_tail = gradients
        zero = saved["tail_max"].new_zeros(())
        g = zero.expand(indices.shape) if grad_log_probs is None else grad_log_probs
        h = zero if grad_log_tail is None else grad_log_tail
        h = torch.where(log_tail == _MINUS_INF, zero, h)  # an empty tail is constant
        has_grad = ((g != 0) & (indices >= 0)).any(1) | (h != 0)
        ids = _Ids(indices, options.tp_rank * source.width)
        of_rows = _Gradients(**saved, g=g, h=h, has_grad=has_grad)

        def of_tile(tile: Tile, gradient: Tensor) -> None:
            part = _Gradients(*(value[tile.rows] for value in of_rows))
            _write_gradient(tile.logits, gradient, ids.in_tile(tile), part)

        return source.gradients(of_tile, needed)

    def _sum_over_ranks(
        self, logits: Tensor, tail: Tensor, options: VocabParallelOptions
    ) -> tuple[Tensor, Tensor]:
        """Fill in the logits ``[n, K]`` at ids of other ranks.

        Returns:
            The tails of all, ``[tp, 2, n]``, and the divisors of all, see :func:`.all_gather_statistics`.

        This is one all-reduce. Each number comes from one rank and zeros from the others, so that all ranks
        have the same bits.
        """
        claim, size = self.claim, options.tp_size
        note = torch.cat([divisor_note(options, logits), claim.marker(logits, int(claim.asked_for))])
        tails, notes = tail[None], note[None]
        if size > 1:
            sent = torch.cat([logits.flatten(), logits.new_zeros(size * (tail.numel() + len(note)))])
            tails, notes = torch.split(sent[logits.numel() :], [size * tail.numel(), size * len(note)])
            tails, notes = tails.view(size, *tail.shape), notes.view(size, -1)
            tails[options.tp_rank], notes[options.tp_rank] = tail, note
            dist.all_reduce(sent, group=options.tp_group)
            logits.copy_(sent[: logits.numel()].view_as(logits))
            tails = tails.clone()
        if claim.asked_for:
            claim.check(notes[:, -1])
        return tails, divisors_of(notes)


def _merged(temperature: float, parts: Sequence[Tensor]) -> Tensor:
    tail = merged_tail([part[-2:] for part in parts], temperature)
    return torch.cat([torch.stack([part[:-2] for part in parts]).sum(0), tail])


def _weight_in_tail(tails: Tensor, options: VocabParallelOptions) -> Tensor:
    """Return the probability of this rank's largest tail logit within all tails ``[tp, 2, rows]``."""
    max_logit = tails[:, 0].amax(0)[:, None].double()
    masses = log_masses(tails.unbind(1), max_logit, options.temperature)
    z = (tails[options.tp_rank, 0].double() - max_logit[:, 0]) / options.temperature
    return (z - masses.logsumexp(1)).exp()


def _repeated_or_none(indices: Tensor) -> Tensor:
    """Return a mask of the entries that must not be counted, bool ``[n, K]``.

    These are negative ids, and all but one occurrence of an id that its row contains several times.
    """
    ids, order = indices.sort(1)
    repeated = ids < 0
    repeated[:, 1:] |= ids[:, 1:] == ids[:, :-1]
    return torch.empty_like(repeated).scatter_(1, order, repeated)


# --- one block of rows after the other


class _Ids(NamedTuple):
    """Token ids ``[n, K]``, negative for none; ``start`` is the id of the first column here."""

    indices: Tensor
    start: int

    def in_tile(self, tile: Tile) -> _Ids:
        return _Ids(self.indices[tile.rows], self.start + tile.columns.start)

    def columns(self, block: slice, width: int) -> _Columns:
        column = self.indices[block] - self.start
        is_local = (column >= 0) & (column < width)
        any_local = torch.where(is_local, column, -1).amax(1, keepdim=True)
        return _Columns(is_local, torch.where(is_local, column, any_local).clamp(min=0), any_local >= 0)


class _Columns(NamedTuple):
    """Local columns for the token ids of one block of rows.

    An id of another rank is given the column of a local id of the same row, so that reading and writing all
    ``K`` columns touches local ids only. A row without a local id is given column 0, which :meth:`put` leaves
    as it is.
    """

    is_local: Tensor  # [rows, K]
    column: Tensor  # [rows, K]
    any_local: Tensor  # [rows, 1]

    def put(self, block: Tensor, value: Tensor | float) -> None:
        """Write one value per column; ids that share a column must have the same value."""
        unchanged = block.gather(1, self.column)
        block.scatter_(1, self.column, torch.where(self.any_local, value, unchanged))

    def summed(self, block: Tensor, value: Tensor) -> Tensor:
        """Return for each id the sum of the values of all ids in its column; the block is scratch memory."""
        block.scatter_(1, self.column, 0.0)
        block.scatter_add_(1, self.column, torch.where(self.is_local, value, 0.0).to(block.dtype))
        return block.gather(1, self.column)


def _statistics(ids: _Ids, tile: Tile) -> Tensor:
    """Return the logits at the ids, 0 for those of other tiles, and the tail as in :mod:`.topk`.

    They are one tensor, ``[K + 2, rows]``.
    """
    rows, ids = tile.logits, ids.in_tile(tile)
    logits = rows.logits.new_empty(ids.indices.shape, dtype=rows.dtype)
    tail = logits.new_empty((2, rows.n))
    divisor = rows.temperature()

    def of_block(block: Block) -> None:
        (work, spare), of_rows = block.work, block.rows
        if block.x is not work:
            work.copy_(block.x)
        columns = ids.columns(of_rows, work.shape[1])
        logits[of_rows] = torch.where(columns.is_local, work.gather(1, columns.column), 0.0)
        columns.put(work, _MINUS_INF)
        tail[0, of_rows], tail[1, of_rows] = block.function(
            stretches(work), (None, False), divisor, stretches(spare)[None]
        )

    each_block(rows, buffered_statistics, of_block, buffers=2)
    return torch.cat([logits.T, tail])


class _Gradients(NamedTuple):
    """The values per row, over the whole vocabulary, from which the gradient of the logits is computed.

    With ``g`` and ``h`` the gradients of the log-probabilities and of the tail's log-probability::

        d / dx = (sum of g at its ids - p * (sum of all g + h) + h * p / tail if in the tail) / temperature
    """

    tail_max: Tensor  # [n], the largest logit of this rank's tail, -inf where the tail is empty
    tail_max_weight: Tensor  # [n] float64, the probability of that logit within the tail of all ranks
    max_logit: Tensor  # [n] float64, the largest of all: differences to it keep digits that large logits lack
    log_sum_exp: Tensor  # [n] float64, of (x - max_logit) / temperature
    log_tail: Tensor  # [n] float64, log-probability of the tail
    g: Tensor  # [n, K]
    h: Tensor  # [n]
    has_grad: Tensor  # [n] bool: g or h is not zero. Other rows get a gradient of 0, even if they hold NaN

    def of_tail(self, block: slice, g_total: Tensor, scale: float) -> tuple[SoftmaxGradient, Tensor]:
        """Return the contribution of the tail's softmax, and which rows have one, ``[rows, 1]``."""
        log_tail, h, tail_max = self.log_tail[block], self.h[block].double(), self.tail_max[block]
        # An empty tail gets no gradient; in a row with NaN it gets NaN like all the rest.
        is_empty = (tail_max == _MINUS_INF) & ~log_tail.isnan()
        has_gradient = self.has_grad[block] & ~is_empty
        a = self.tail_max_weight[block] * (-h * log_tail.expm1() - log_tail.exp() * g_total) / scale
        return (tail_max[:, None], a.to(tail_max.dtype)[:, None], None), has_gradient[:, None]

    def at_ids(self, block: slice, logits: Tensor, g_at_ids: Tensor, g_total: Tensor, scale: float) -> Tensor:
        """Return the gradient at the ids ``[rows, K]``, float64."""
        max_logit, log_sum_exp = self.max_logit[block, None], self.log_sum_exp[block, None]
        log_p = (logits.double() - max_logit) / scale - log_sum_exp
        of_others = (g_total + self.h[block])[:, None] - g_at_ids
        # 1 - p, accurate when p is near 1
        gradient = (-g_at_ids * log_p.expm1() - log_p.exp() * of_others) / scale
        return torch.where(self.has_grad[block, None], gradient, 0.0)


def _write_gradient(rows: SelectedRows, gradient: Tensor, ids: _Ids, gradients: _Gradients) -> None:
    """Write the gradient of these rows into that of all logits, ``[T, V / tp]``."""
    scale, divisor = rows.options.scale, rows.temperature()

    def of_block(block: Block) -> None:
        work, of_rows = block.out, block.rows
        if work is not block.x:
            work.copy_(block.x)
        columns = ids.columns(of_rows, work.shape[1])
        logits = work.gather(1, columns.column)
        g = torch.where(ids.indices[of_rows] < 0, 0.0, gradients.g[of_rows])
        g_total = g.sum(1, dtype=torch.float64)
        g_at_ids = columns.summed(work, g).double()
        work.scatter_(1, columns.column, torch.where(columns.any_local, _MINUS_INF, logits))
        of_tail, has_grad = gradients.of_tail(of_rows, g_total, scale)
        block.function(work, work, of_tail, NO_SOFTMAX, None, has_grad, divisor, work[None])
        values = gradients.at_ids(of_rows, logits, g_at_ids, g_total, scale)
        columns.put(work, values.to(work.dtype))

    each_block(rows, block_gradient, of_block, buffers=int(not rows.can_be_viewed), gradient=gradient)
