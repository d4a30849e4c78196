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
from .blocks import COMPILED_BLOCKS, Block, each_block, stretches
from .distributions import NO_ENTRY
from .ids import Ids, repeated_or_none, summed_by_id
from .rows import Inputs, LogitSource, SelectedRows, Tile, rows_of
from .slices import Rows
from .softmax import (
    NO_SOFTMAX,
    SoftmaxGradient,
    block_gradient,
    block_statistics,
    buffered_statistics,
)
from .topk import BLOCKS_WITH_MASK, blocks_of_rows, log_masses, merged_tail, total_and_tail

_MINUS_INF = float("-inf")


@overload
def vocab_parallel_log_probs_at(
    logits: Tensor,
    indices: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    rows: Rows = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
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
    vocab_size: int | None = None,
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
    vocab_size: int | None = None,
    with_tail: bool = False,
    inplace_backward: bool = False,
    block_bytes: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return log-probabilities of given tokens of each selected row, and of all others together.

    The result is differentiable.
    For backward it keeps the logits themselves, the ids and a few numbers per row. Backward allocates the
    gradient and a block of rows, or with ``inplace_backward`` the block alone, and one number per id.

    Args:
        logits: ``[T, V / tp]``; ``tp_group``, ``rows``, ``temperature``, ``vocab_size``, ``inplace_backward``
            and ``block_bytes`` too are those of :func:`vocab_parallel_log_probs`.
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
        tp_group, temperature, inplace_backward, block_bytes, ignore_index=NO_ENTRY, vocab_size=vocab_size
    )
    source = rows_of(logits, rows, options)
    indices = valid_indices(indices, source)
    log_probs, log_tail = _LogProbsAt(source.claim()).apply(source, indices=indices)
    return (log_probs, log_tail) if with_tail else log_probs


class _LogProbsAt(LogitFunction):
    """Log-probabilities at ids ``[n, K]``, negative for none, and of the tail."""

    def forward(self, source: LogitSource, tensors: Tensors) -> tuple[list[Tensor], Tensors]:
        indices, options = tensors["indices"], source.options
        ids = Ids(indices, options.tp_rank * source.width)
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
            inside = z.masked_fill(repeated_or_none(indices[block]), _MINUS_INF)
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
        indices, options = saved.pop("indices"), source.options
        ids = Ids(indices, options.tp_rank * source.width)
        of_rows = _row_terms(indices, saved, options, *gradients)

        def of_tile(tile: Tile, gradient: Tensor) -> None:
            _write_gradient(tile.logits, gradient, ids.in_tile(tile), of_rows.part(tile.rows))

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


# --- one block of rows after the other


def _statistics(ids: Ids, tile: Tile) -> Tensor:
    """Return the logits at the ids, 0 for those of other tiles, and the tail as in :mod:`.topk`.

    They are one tensor, ``[K + 2, rows]``.
    """
    rows, ids = tile.logits, ids.in_tile(tile)
    logits = rows.logits.new_empty(ids.indices.shape, dtype=rows.dtype)
    tail = logits.new_empty((2, rows.n))
    divisor = rows.temperature()

    def of_block(block: Block) -> None:
        x, columns = block.x.view(-1, rows.width), ids.columns(block.rows, rows.width)
        if block.is_compiled:
            logits[block.rows] = columns.take(x).to(rows.dtype)
            in_tail = torch.ones(x.shape, dtype=torch.bool, device=x.device)
            columns.put(in_tail, False)
            [values] = block.function(block.x, [(block.cut(in_tail), False)], divisor)
        else:
            work, spare = block.work
            work.copy_(x)
            logits[block.rows] = columns.take(work)
            columns.put(work, _MINUS_INF)
            values = buffered_statistics(stretches(work), (None, False), divisor, stretches(spare)[None])
        tail[0, block.rows], tail[1, block.rows] = values

    each_block(
        rows, block_statistics, of_block, buffers=2, scale=COMPILED_BLOCKS, scale_on_gpu=BLOCKS_WITH_MASK
    )
    return torch.cat([logits.T, tail])


class _RowTerms(NamedTuple):
    """The values per row, over the whole vocabulary, from which the gradient of the logits is computed.

    With ``g`` and ``h`` the gradients of the log-probabilities and of the tail's log-probability::

        d / dx = (sum of g at its ids - p * (sum of all g + h) + h * p / tail if in the tail) / temperature
    """

    max_logit: Tensor  # [n] float64, the largest of all: differences to it keep digits that large logits lack
    log_sum_exp: Tensor  # [n] float64, of (x - max_logit) / temperature
    g_at_ids: Tensor  # [n, K], the sum of g over all places that have the same id in this row
    total: Tensor  # [n] float64, the sum of all g and h
    has_grad: Tensor  # [n] bool: g or h is not zero. Other rows get a gradient of 0, even if they hold NaN
    tail_max: Tensor  # [n, 1], the largest logit of this rank's tail, -inf where the tail is empty
    of_tail: Tensor  # [n, 1], what is multiplied by exp((x - tail_max) / temperature) in the tail
    has_tail: Tensor  # [n, 1] bool: there is a gradient in the tail

    def part(self, rows: slice) -> _RowTerms:
        return _RowTerms(*(value[rows] for value in self))

    def at_ids(self, logits: Tensor, scale: float) -> Tensor:
        """Return the gradient at the ids, whose logits these are, ``[n, K]`` in float64."""
        log_p = (logits.double() - self.max_logit[:, None]) / scale - self.log_sum_exp[:, None]
        of_others = self.total[:, None] - self.g_at_ids
        # 1 - p, accurate when p is near 1
        gradient = (-self.g_at_ids * log_p.expm1() - log_p.exp() * of_others) / scale
        return torch.where(self.has_grad[:, None], gradient, 0.0)


def _row_terms(
    indices: Tensor,
    saved: Tensors,
    options: VocabParallelOptions,
    grad_log_probs: Tensor | None,
    grad_log_tail: Tensor | None,
) -> _RowTerms:
    """Return the terms of all rows, from the gradients of the results."""
    log_tail, tail_max = saved["log_tail"], saved["tail_max"]
    zero = tail_max.new_zeros(())
    g = zero.expand(indices.shape) if grad_log_probs is None else grad_log_probs
    g = torch.where(indices < 0, 0.0, g)
    h = zero if grad_log_tail is None else grad_log_tail
    h = torch.where(log_tail == _MINUS_INF, zero, h).double()  # an empty tail is constant
    g_total, g_at_ids = g.sum(1, dtype=torch.float64), torch.empty_like(g)
    for block in blocks_of_rows(g, indices.shape[1], options):
        g_at_ids[block] = summed_by_id(indices[block], g[block])
    # An empty tail gets no gradient; in a row with NaN it gets NaN like all the rest.
    is_empty = (tail_max == _MINUS_INF) & ~log_tail.isnan()
    has_grad = (g != 0).any(1) | (h != 0)
    of_tail = -h * log_tail.expm1() - log_tail.exp() * g_total
    of_tail = (saved["tail_max_weight"] * of_tail / options.scale).to(tail_max.dtype)
    return _RowTerms(
        saved["max_logit"],
        saved["log_sum_exp"],
        g_at_ids,
        g_total + h,
        has_grad,
        *(values[:, None] for values in (tail_max, of_tail, has_grad & ~is_empty)),
    )


def _write_gradient(rows: SelectedRows, gradient: Tensor, ids: Ids, of_rows: _RowTerms) -> None:
    """Write the gradient of these rows into that of all logits, ``[T, V / tp]``."""
    of_tail: SoftmaxGradient = of_rows.tail_max, of_rows.of_tail, None
    scale, divisor = rows.options.scale, rows.temperature()

    def of_block(block: Block) -> None:
        x, out = (logits.view(-1, rows.width) for logits in (block.x, block.out))
        columns = ids.columns(block.rows, rows.width)
        values = of_rows.part(block.rows).at_ids(x.gather(1, columns.column), scale).to(out.dtype)
        block.function(
            block.x,
            block.out,
            tuple(map(block.part, of_tail)),
            NO_SOFTMAX,
            None,
            block.part(of_rows.has_tail),
            divisor,
            None if block.is_compiled else block.work,
        )
        columns.put(out, values)

    buffers = int(not rows.can_be_viewed)
    each_block(rows, block_gradient, of_block, buffers=buffers, scale=COMPILED_BLOCKS, gradient=gradient)
