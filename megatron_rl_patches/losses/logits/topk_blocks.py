"""A rank's own logits at some ids of each row, and all its other logits, one block of rows at a time.

The other logits, the *tail*, have a softmax of their own. Their statistics are relative to the tail's largest
logit, so that they keep all digits where the ids have next to all of the probability.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .rows import SelectedRows
from .softmax import (
    SoftmaxGradient,
    block_gradient,
    block_statistics,
    finite,
    part_of_rows,
    scaled_,
    stretches,
    sum_exp,
)

_MINUS_INF = float("-inf")
_SMALLEST_GROUP, _LARGEST_GROUP = 4, 16


class Ids(NamedTuple):
    """Token ids ``[n, K]``, negative for none; ``start`` is the id of this rank's first column."""

    indices: Tensor
    start: int

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


def largest(rows: SelectedRows, k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ``k`` largest logits of each row.

    Returns:
        Logits ``[n, k]`` and their columns ``[n, k]``, from the largest on, equal ones from the lowest column
        on; and of all others ``(max_logit, sum_exp_minus_1)`` ``[2, n]``, see :func:`.softmax.statistics`.
    """
    width = rows.logits.shape[1]
    logits = rows.logits.new_empty((rows.n, k), dtype=rows.dtype)
    columns = torch.empty_like(logits, dtype=torch.int64)
    tail = logits.new_zeros((2, rows.n))
    divisor = rows.scalar(temperature)
    blocks = rows.blocks(buffers=1)
    scratch = rows.scratch(blocks, 1)[0]
    for block in blocks:
        work = scratch[: block.stop - block.start]
        x = rows.read(block, work)
        # One more than is asked for, which is the largest of the tail.
        top, top_columns = _topk(x, min(k + 1, width))
        logits[block], columns[block] = top[:, :k], top_columns[:, :k]
        tail[0, block] = top[:, k] if k < width else _MINUS_INF
        z = torch.sub(x, finite(tail[0, block])[:, None], out=work)
        z.scatter_(1, top_columns, _MINUS_INF)
        tail[1, block] = sum_exp(scaled_(z, divisor))
    # torch.topk does not say which of equal logits it takes for the last places. It had a choice where the
    # tail still has such a logit. The statistics of the tail do not depend on the choice.
    _take_lowest_columns(rows, logits, columns, (tail[0] == logits[:, -1]).nonzero().squeeze(1))
    columns, order = columns.sort(1)
    logits, order = logits.gather(1, order).sort(dim=1, descending=True, stable=True)
    return logits, columns.gather(1, order), tail


def _topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return what ``x.topk(k)`` does, in half of the time where a row is much longer than ``k``.

    The columns are cut into groups. The groups with the ``k`` largest maxima have the ``k`` largest logits.
    """
    width = x.shape[1]
    size = min(math.isqrt(width // k), _LARGEST_GROUP)
    if size < _SMALLEST_GROUP:
        return x.topk(k)
    # A group has every groups-th column: a maximum over such groups reads the memory in order.
    groups = width // size
    in_groups = x[:, : size * groups].unflatten(1, (size, groups))  # type: ignore[no-untyped-call]
    chosen = in_groups.amax(1).topk(k, sorted=False).indices
    columns = torch.arange(width, device=x.device)
    of_groups, without_group = columns[: size * groups].view(size, groups), columns[size * groups :]
    of_chosen = of_groups[:, chosen].transpose(0, 1).flatten(1)
    candidates = torch.cat([of_chosen, without_group.expand(len(x), -1)], 1)
    logits, places = x.gather(1, candidates).topk(k)
    return logits, candidates.gather(1, places)


def _take_lowest_columns(rows: SelectedRows, logits: Tensor, columns: Tensor, chosen: Tensor) -> None:
    """Give the last places of some rows, where logits are equal, the lowest columns that have this logit.

    Args:
        logits: the ``k`` largest of each row, ``[n, k]``, from the largest on.
        columns: their columns, which are changed.
        chosen: int64, numbers of rows, of the ``n``.
    """
    k = logits.shape[1]
    part = replace(rows, index=rows.row_indices[chosen])
    for block in part.blocks(buffers=2):
        numbers = chosen[block]
        lowest = logits[numbers, -1:]
        row, column = (part.read(block, None) == lowest).nonzero(as_tuple=True)
        places = (logits[numbers] == lowest).sum(1)
        tied = row.bincount(minlength=len(numbers))
        # The how manieth of its row's equal logits each is, from the lowest column on.
        number = torch.arange(len(row), device=row.device) - (tied.cumsum(0) - tied)[row]
        taken = number < places[row]
        row, column, number = row[taken], column[taken], number[taken]
        columns[numbers[row], k - places[row] + number] = column


def statistics(rows: SelectedRows, ids: Ids, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the logits at the ids, ``[n, K]``, 0 for those of other ranks; the tail as :func:`largest`."""
    logits = rows.logits.new_empty(ids.indices.shape, dtype=rows.dtype)
    tail = logits.new_empty((2, rows.n))
    divisor = rows.scalar(temperature)
    for block, work, spare in _copies(rows, buffers=2):
        columns = ids.columns(block, work.shape[1])
        logits[block] = torch.where(columns.is_local, work.gather(1, columns.column), 0.0)
        columns.put(work, _MINUS_INF)
        max_logit, sum_exp_minus_1 = block_statistics(
            stretches(work), None, divisor, False, stretches(spare)[None]
        )
        tail[0, block], tail[1, block] = max_logit, sum_exp_minus_1
    return logits, tail


class Gradients(NamedTuple):
    """The values per row, over the whole vocabulary, from which the gradient of the logits is computed.

    With ``g`` and ``h`` the gradients of the log-probabilities and of the tail's log-probability::

        d / dx = (sum of g at its ids - p * (sum of all g + h) + h * p / tail if in the tail) / temperature
    """

    tail_max: Tensor  # [n], the largest logit of this rank's tail, -inf where the tail is empty
    tail_max_weight: Tensor  # [n] float64, the probability of that logit within the tail of all ranks
    max_logit: Tensor  # [n], the largest logit of all: differences to it keep digits that large logits lack
    log_sum_exp: Tensor  # [n] float64, of (x - max_logit) / temperature
    log_tail: Tensor  # [n] float64, log-probability of the tail
    g: Tensor  # [n, K]
    h: Tensor  # [n]
    has_grad: Tensor  # [n] bool: g or h is not zero. Other rows get a gradient of 0, even if they hold NaN

    def of_tail(self, block: slice, g_total: Tensor, temperature: float) -> tuple[SoftmaxGradient, Tensor]:
        """Return the contribution of the tail's softmax, and which rows have one, ``[rows, 1]``."""
        log_tail, h, tail_max = self.log_tail[block], self.h[block].double(), self.tail_max[block]
        # An empty tail gets no gradient; in a row with NaN it gets NaN like all the rest.
        is_empty = (tail_max == _MINUS_INF) & ~log_tail.isnan()
        has_gradient = self.has_grad[block] & ~is_empty
        a = self.tail_max_weight[block] * (-h * log_tail.expm1() - log_tail.exp() * g_total) / temperature
        return SoftmaxGradient(tail_max[:, None], a.to(tail_max.dtype)[:, None]), has_gradient[:, None]

    def at_ids(
        self, block: slice, logits: Tensor, g_at_ids: Tensor, g_total: Tensor, temperature: float
    ) -> Tensor:
        """Return the gradient at the ids ``[rows, K]``, float64."""
        max_logit, log_sum_exp = self.max_logit[block, None].double(), self.log_sum_exp[block, None]
        log_p = (logits.double() - max_logit) / temperature - log_sum_exp
        of_others = (g_total + self.h[block])[:, None] - g_at_ids
        # 1 - p, accurate when p is near 1
        gradient = (-g_at_ids * log_p.expm1() - log_p.exp() * of_others) / temperature
        return torch.where(self.has_grad[block, None], gradient, 0.0)


def gradient(
    rows: SelectedRows, ids: Ids, gradients: Gradients, temperature: float, in_place: bool
) -> Tensor:
    """Return the gradient of all logits ``[T, V / tp]``, zero in the rows that were not selected."""
    gradient = rows.new_gradient(in_place)
    divisor = rows.scalar(temperature)
    blocks = rows.blocks(buffers=1)
    scratch = rows.scratch(blocks, int(not rows.can_be_viewed))
    for block in blocks:
        x, work = rows.read_and_write_views(gradient, block, scratch[:, : block.stop - block.start])
        if work is not x:
            work.copy_(x)
        columns = ids.columns(block, work.shape[1])
        logits = work.gather(1, columns.column)
        g = torch.where(ids.indices[block] < 0, 0.0, gradients.g[block])
        g_total = g.sum(1, dtype=torch.float64)
        g_at_ids = columns.summed(work, g).double()
        work.scatter_(1, columns.column, torch.where(columns.any_local, _MINUS_INF, logits))
        of_tail, has_grad = gradients.of_tail(block, g_total, temperature)
        tail_part, no_part = part_of_rows(of_tail, slice(None)), part_of_rows(None, block)
        block_gradient(work, work, tail_part, no_part, None, has_grad, divisor, work[None])
        values = gradients.at_ids(block, logits, g_at_ids, g_total, temperature)
        columns.put(work, values.to(work.dtype))
        rows.write(gradient, block, work)
    return gradient


def _copies(rows: SelectedRows, buffers: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield each block, a copy of its logits, and a buffer of the same size; both may be overwritten.

    A block is so small that ``buffers`` of its size fit into ``block_bytes``.
    """
    blocks = rows.blocks(buffers)
    scratch = rows.scratch(blocks, 2)
    for block in blocks:
        work, spare = scratch[:, : block.stop - block.start]
        x = rows.read(block, work)
        if x is not work:
            work.copy_(x)
        yield block, work, spare
