"""Log-probabilities of given tokens of logits split over the vocabulary, and of all others together.

For logits ``x`` of a row, a temperature ``T`` and ids ``S``, with ``p = softmax(x / T)``::

    log_prob of id   = log p[id]                   d / dx = (onehot(id) - p) / T
    tail_log_prob    = log(sum of p outside S)     d / dx = (p / tail outside S - p) / T

The tail has a softmax of its own, see :mod:`.topk`. A block of columns adds the logits at the ids, -inf for
ids of other blocks, and the tail's largest logit and sum. Backward has no collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict, overload

import torch
import torch.distributed as dist
from torch import Tensor

from .arguments import Rows, VocabParallelOptions
from .reduction import Block, Blocks, Loss, Read, Results, Writer, ranges, rows_of_block
from .softmax import NO_SOFTMAX, block_gradient, block_statistics, buffered_statistics, merged
from .sources import Source, Tensors, rows_of, valid_ids

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MINUS_INF = float("-inf")
BLOCKS_WITH_MASK = Blocks(2, compiled=32, compiled_on_gpu=4)  # small ones, since each has a mask of its size


class _Options(TypedDict, total=False):
    tp_group: dist.ProcessGroup | None
    rows: Rows
    temperature: float
    vocab_size: int | None
    inplace_backward: bool
    block_bytes: int | None


@overload
def vocab_parallel_log_probs_at(
    logits: Tensor, indices: Tensor, *, with_tail: Literal[False] = False, **options: Unpack[_Options]
) -> Tensor: ...


@overload
def vocab_parallel_log_probs_at(
    logits: Tensor, indices: Tensor, *, with_tail: Literal[True], **options: Unpack[_Options]
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

    Args:
        logits: ``[T, V / tp]``; for this and the others see :func:`vocab_parallel_log_probs`.
        indices: token ids ``[n, K]`` in the whole vocabulary, of the selected rows, the same on all ranks. An
            id may occur twice in a row; its probability counts once. -100, which fills up rows of fewer ids,
            is no id: it has log-probability -inf and no gradient.
        with_tail: also return the log-probability of the vocabulary without the ids. In float32 its relative
            error is below 5e-6, however small the tail is.

    Returns:
        ``[n, K]``, or this and ``[n]``, in float32 (float64 for float64 logits), the same bits on all ranks
        of ``tp_group``. A tail without any token is -inf and has no gradient. NaN and +inf make NaN of their
        row, its tail included. Backward needs the logits themselves, the ids and a few numbers per row, and
        allocates the gradient, unless it is in place.

    Raises:
        InvalidInputError: as :func:`vocab_parallel_log_probs`; the one collective is an all-gather of
            ``K + 2`` numbers per row.
    """
    options = VocabParallelOptions(tp_group, temperature, inplace_backward, block_bytes, vocab_size)
    source = rows_of(logits, rows, options)
    log_probs, log_tail = LogProbsAt()(source, indices=valid_ids("indices", indices, source, several=True))
    return (log_probs, log_tail) if with_tail else log_probs


class LogProbsAt(Loss):
    """Log-probabilities at ids ``[n, K]``, negative for none, and of the tail."""

    def forward(self, sources: Sequence[Source], tensors: Tensors, read: Read) -> Results:
        (source,), indices = sources, tensors["indices"]
        options, scale = source.options, source.scale

        def part(block: Block) -> Tensor:
            x, work = block.xs[0].flatten(1), block.work
            columns = Columns.find(indices, source, block)
            at_ids = torch.where(columns.is_local, x.gather(1, columns.column), _MINUS_INF).double()
            if work is None:
                in_tail = torch.ones(x.shape, dtype=torch.bool, device=x.device)
                columns.put(in_tail, False)
                [tail] = block.function(block.xs[0], [(block.cut(in_tail), False)], scale)
            else:
                work[0].copy_(block.xs[0])
                columns.put(work[0].flatten(1), _MINUS_INF)
                tail = buffered_statistics(work[0], (None, False), scale, work[1:])
            values = torch.cat([at_ids.T, torch.stack([value.double() for value in tail])])
            values[:-1] /= options.divisor
            return values

        def merge(parts: Sequence[Tensor]) -> Tensor:
            at_ids = torch.stack([values[:-2] for values in parts]).amax(0)
            return torch.cat([at_ids, merged([values[-2:] for values in parts], options.temperature)])

        total = read(block_statistics, part, merge, BLOCKS_WITH_MASK)
        (tail_max, tail_sum), max_logit = total[-2:], total[:-1].amax(0)
        log_sum_exp, log_tail = torch.empty_like(max_logit), torch.empty_like(max_logit)
        log_probs = torch.empty(indices.shape, dtype=source.dtype, device=source.device)
        for rows in blocks_of_rows(log_probs, options):
            z = ((total[:-2, rows] - max_logit[rows]) / options.temperature).T
            inside = z.masked_fill(repeated_or_none(indices[rows]), _MINUS_INF)
            tail = tail_max[rows] - max_logit[rows], tail_sum[rows]
            log_total, log_tail[rows] = total_and_tail(inside, *tail, options.temperature)
            log_sum_exp[rows] = log_total.squeeze(1)
            log_probs[rows] = (z - log_total).masked_fill(indices[rows] < 0, _MINUS_INF)
        saved = {
            "indices": indices,
            # Backward compares with the logits that this rank reads.
            "tail_max": (tail_max * options.divisor).to(source.dtype),
            "tail_max_weight": 1.0 / (1.0 + tail_sum),
            "max_logit": max_logit * options.divisor,  # differences to it keep digits that large logits lack
            "log_sum_exp": log_sum_exp,
            "log_tail": log_tail,
        }
        # The caller may change the returned tensors, so none of them is a saved tensor.
        return [log_probs, log_tail.to(source.dtype, copy=True)], saved

    def writer(self, sources: Sequence[Source], saved: Tensors, *gradients: Tensor | None) -> Writer:
        (source,), (log_prob_gradient, tail_gradient) = sources, gradients
        indices, tail_max, weight, max_logit, log_sum_exp, log_tail = saved.values()
        scale = source.options.scale
        zero = tail_max.new_zeros(())
        g = torch.where(indices < 0, 0.0, zero if log_prob_gradient is None else log_prob_gradient)
        h = zero if tail_gradient is None else tail_gradient
        h = torch.where(log_tail == _MINUS_INF, zero, h).double()  # an empty tail is constant
        g_total, g_at_ids = g.sum(1, keepdim=True, dtype=torch.float64), torch.empty_like(g)
        for rows in blocks_of_rows(g, source.options):
            g_at_ids[rows] = summed_by_id(indices[rows], g[rows])
        h, log_tail, tail_max, weight = (values[:, None] for values in (h, log_tail, tail_max, weight))
        # Rows without a gradient may hold NaN. An empty tail gets none; in a row with NaN it gets NaN, too.
        has_grad = (g != 0).any(1, keepdim=True) | (h != 0)
        in_tail = has_grad & ((tail_max != _MINUS_INF) | log_tail.isnan())
        tail_factor = weight * (-h * log_tail.expm1() - log_tail.exp() * g_total) / scale
        tail_factor, g_all = tail_factor.to(tail_max.dtype), g_total + h

        def write(block: Block) -> None:
            rows, columns, x = block.rows, Columns.find(indices, source, block), block.xs[0]
            z = x.flatten(1).gather(1, columns.column).double() - max_logit[rows, None]
            log_p, g_of_ids = z / scale - log_sum_exp[rows, None], g_at_ids[rows]
            # 1 - p, accurate when p is near 1
            at_ids = (-g_of_ids * log_p.expm1() - log_p.exp() * (g_all[rows] - g_of_ids)) / scale
            at_ids = torch.where(has_grad[rows], at_ids, 0.0).to(block.out.dtype)
            softmax, has_tail = (block.part(tail_max), block.part(tail_factor), None), block.part(in_tail)
            block.function(x, block.out, softmax, NO_SOFTMAX, None, has_tail, source.scale, block.work)
            columns.put(block.out.flatten(1), at_ids)

        return Writer(block_gradient, write, Blocks(0))


# --- ids of a block


class Columns(NamedTuple):
    """Columns of a block for all token ids of its rows, so that writing ``K`` values touches local ids only.

    An id of another block gets the column of a local id of its row, or 0, which :meth:`put` leaves as it is.
    """

    is_local: Tensor  # [rows, K]
    column: Tensor  # [rows, K]
    any_local: Tensor  # [rows, 1]
    place: Tensor  # [rows, 1], of the local id whose column those of other blocks have

    @classmethod
    def find(cls, indices: Tensor, source: Source, block: Block) -> Columns:
        """Return the columns of token ids ``[n, K]``, negative for none."""
        column, is_local = source.columns_of_ids(indices[block.rows], block.tile.columns)
        largest, place = torch.where(is_local, column, -1).max(1, keepdim=True)
        return cls(is_local, torch.where(is_local, column, largest).clamp(min=0), largest >= 0, place)

    def put(self, block: Tensor, value: Tensor | float) -> None:
        """Write one value, or one per local id; where an id is repeated, these must be the same."""
        if isinstance(value, Tensor):
            value = torch.where(self.is_local, value, value.gather(1, self.place))
        unchanged = block.gather(1, self.column)
        block.scatter_(1, self.column, torch.where(self.any_local, value, unchanged))


def repeated_or_none(indices: Tensor) -> Tensor:
    """Return which of ``[n, K]`` are negative ids, or all but one occurrence of an id within its row."""
    ids, order = indices.sort(1)
    repeated = ids < 0
    repeated[:, 1:] |= ids[:, 1:] == ids[:, :-1]
    return torch.empty_like(repeated).scatter_(1, order, repeated)


def summed_by_id(indices: Tensor, values: Tensor) -> Tensor:
    """Return for each place ``[rows, K]`` the sum of the values of all places that have its id."""
    ids, order = indices.sort(1)
    number = torch.zeros_like(ids)  # of the id, among those that its row has
    number[:, 1:] = (ids[:, 1:] != ids[:, :-1]).cumsum(1)
    number = torch.empty_like(number).scatter_(1, order, number)
    return torch.zeros_like(values).scatter_add_(1, number, values).gather(1, number)


def total_and_tail(
    z: Tensor, tail_max: Tensor, sum_exp_minus_1: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the log of the sum of all, ``[n, 1]``, and the log of the tail's part of it, ``[n]``.

    ``z`` ``[n, K]`` are the logs of the ids' terms, -inf for those that do not count. The tail's largest
    logit is relative to the same logit as ``z``, and the sum of its terms to the tail's largest logit.
    """
    log_ids = z.logsumexp(1, keepdim=True)
    log_tail = (tail_max / temperature + sum_exp_minus_1.log1p())[:, None]
    # A difference of two logarithms would lose the digits of a tail near 1.
    log_share = torch.nn.functional.logsigmoid(log_tail - log_ids)
    return torch.logaddexp(log_ids, log_tail), log_share.squeeze(1)


def blocks_of_rows(values: Tensor, options: VocabParallelOptions) -> list[slice]:
    """Cut rows ``[n, K]`` such that a handful of float64 and int64 temporaries fit into a block."""
    row_bytes = 16 * values.shape[1] * max(values.element_size(), 4)
    return ranges(0, len(values), rows_of_block(values, options, row_bytes))
