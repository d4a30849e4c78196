"""A rank's own logits at some ids of each row, and all others together, one block of rows at a time.

The others, the tail, have a softmax of their own: relative to their own largest logit they keep all digits,
also where beside the ids their sum is nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _eager
from ._shard import Shard, Term

_MINUS_INF = float("-inf")


class Ids(NamedTuple):
    """Token ids ``[n, K]``, negative for none; ``start`` is the id of this rank's first column."""

    indices: Tensor
    start: int

    def places(self, block: slice, width: int) -> _Places:
        column = self.indices[block] - self.start
        here = (column >= 0) & (column < width)
        any_here = torch.where(here, column, -1).amax(1, keepdim=True)
        return _Places(here, torch.where(here, column, any_here).clamp(min=0), any_here >= 0)


class _Places(NamedTuple):
    """Where the ids of a block are among this rank's columns.

    What is not here stands for another id of its row that is, so that nothing is written anywhere else; and
    for column 0 in rows that have none, which keeps what it has.
    """

    here: Tensor  # [rows, K]
    column: Tensor  # [rows, K]
    any_here: Tensor  # [rows, 1]

    def put(self, block: Tensor, value: Tensor | float) -> None:
        """``value`` is one that depends on the column alone, as these may coincide."""
        kept = block.gather(1, self.column)
        block.scatter_(1, self.column, torch.where(self.any_here, value, kept))

    def added_up(self, block: Tensor, value: Tensor) -> Tensor:
        """The sum of the values at each place over all that coincide with it; destroys the block there."""
        block.scatter_(1, self.column, 0.0)
        block.scatter_add_(1, self.column, torch.where(self.here, value, 0.0).to(block.dtype))
        return block.gather(1, self.column)


def largest(shard: Shard, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``k`` largest logits of each row.

    Returns:
        The logits ``[n, k]`` and their columns ``[n, k]``, from the largest on and equal ones from the lowest
        column on, and ``(top, rest)`` ``[2, n]`` of all others, as :func:`._local.statistics` has them.
    """
    logits = shard.logits.new_empty((shard.n, k), dtype=shard.dtype)
    columns = torch.empty_like(logits, dtype=torch.int64)
    tail = logits.new_empty((2, shard.n))
    blocks = shard.blocks(buffers=3)
    [buffer] = _eager.scratch_buffers(shard, blocks, 1)
    for block in blocks:
        work = _copied(shard, block, buffer[: block.stop - block.start])
        logits[block], columns[block] = _largest(work, k)
        work.scatter_(1, columns[block], _MINUS_INF)
        _eager.block_statistics(work, shard.temperature, work, None, tail[:, block])
    return logits, columns, tail


def _largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, columns = x.topk(k)
    # Which columns topk takes of those that tie for the last places, and in which order, it does not say.
    lowest = values[:, -1:]
    numbers = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
    tied = torch.where(x == lowest, numbers, x.shape[1]).topk(k, largest=False).values.long()
    # Not those that are greater: NaN comes first, and is not.
    place = torch.arange(k, device=x.device) - (values != lowest).sum(1, keepdim=True)
    columns = torch.where(values == lowest, tied.gather(1, place.clamp(min=0)), columns)
    columns, order = columns.sort(1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)


def statistics(shard: Shard, ids: Ids) -> tuple[Tensor, Tensor]:
    """The logits at the ids, ``[n, K]``, 0 where another rank has them, and the tail as :func:`largest`."""
    logits = shard.logits.new_empty(ids.indices.shape, dtype=shard.dtype)
    tail = logits.new_empty((2, shard.n))
    blocks = shard.blocks(buffers=1)
    [buffer] = _eager.scratch_buffers(shard, blocks, 1)
    for block in blocks:
        work = _copied(shard, block, buffer[: block.stop - block.start])
        places = ids.places(block, work.shape[1])
        logits[block] = torch.where(places.here, work.gather(1, places.column), 0.0)
        places.put(work, _MINUS_INF)
        _eager.block_statistics(work, shard.temperature, work, None, tail[:, block])
    return logits, tail


class Gradients(NamedTuple):
    """What the logits' gradient is made of, beside them: of each row over the whole vocabulary.

    With ``g`` and ``h`` the gradients of the log-probabilities and of the tail's::

        d / dx = (sum of g here - p * (sum of all g + h) + h * p / tail if outside the ids) / temperature
    """

    tail_top: Tensor  # [n], of this rank, -inf where its tail is empty
    tail_share: Tensor  # [n] float64, probability of that logit within the tail of all ranks
    highest: Tensor  # [n], the largest logit of all: differences to it keep the digits that large ones lack
    log_total: Tensor  # [n] float64, log of the sum of exp((x - highest) / temperature)
    log_tail: Tensor  # [n] float64, log of the tail's probability
    g: Tensor  # [n, K]
    h: Tensor  # [n]
    flows: Tensor  # [n] bool, whether any of these is not zero: if none is, NaN in the row shall not show

    def outside(self, block: slice, g_total: Tensor, temperature: float) -> Term:
        """The part of the ids' complement, ``[rows, 1]``; ``p / tail`` is the tail's own softmax."""
        log_tail, h, top = self.log_tail[block], self.h[block].double(), self.tail_top[block]
        # Nothing to write, but in a row with NaN that is what all of it shall be.
        none = ((top == _MINUS_INF) & ~log_tail.isnan()) | ~self.flows[block]
        a = self.tail_share[block] * (-h * log_tail.expm1() - log_tail.exp() * g_total) / temperature
        a = torch.where(none, 0.0, a).to(top.dtype)
        return Term(torch.where(none, 0.0, top)[:, None], (~none).to(top.dtype)[:, None], a[:, None], None)

    def at_ids(
        self, block: slice, logits: Tensor, g_here: Tensor, g_total: Tensor, temperature: float
    ) -> Tensor:
        highest, log_total = self.highest[block, None].double(), self.log_total[block, None]
        log_p = (logits.double() - highest) / temperature - log_total
        elsewhere = (g_total + self.h[block])[:, None] - g_here
        # 1 - p, of a p that may be next to 1
        found = (-g_here * log_p.expm1() - log_p.exp() * elsewhere) / temperature
        return torch.where(self.flows[block, None], found, 0.0)


def gradient(shard: Shard, ids: Ids, gradients: Gradients, in_place: bool) -> Tensor:
    """The gradient of all logits ``[T, V / tp]``, zero in other rows; ``in_place``: written into them."""
    out = shard.gradient_buffer(in_place)
    direct = isinstance(shard.rows, slice) and out.dtype == shard.dtype
    blocks = shard.blocks(buffers=1)
    [buffer] = _eager.scratch_buffers(shard, [] if direct else blocks, 1)
    for block in blocks:
        work = shard.view(out, block) if direct else buffer[: block.stop - block.start]
        _copied(shard, block, work)
        places = ids.places(block, work.shape[1])
        logits = work.gather(1, places.column)
        g = torch.where(ids.indices[block] < 0, 0.0, gradients.g[block])
        g_total = g.sum(1, dtype=torch.float64)
        g_here = places.added_up(work, g).double()
        work.scatter_(1, places.column, torch.where(places.any_here, _MINUS_INF, logits))
        term = gradients.outside(block, g_total, shard.temperature)
        _eager.fill(work, work, term, shard.temperature, out=work)
        places.put(work, gradients.at_ids(block, logits, g_here, g_total, shard.temperature).to(work.dtype))
        if not direct:
            _eager.write(shard, out, block, work)
    return out


def _copied(shard: Shard, block: slice, buffer: Tensor) -> Tensor:
    """The logits of a block in the buffer, which may be where they are."""
    x = _eager.read(shard, block, buffer)
    return buffer if x.data_ptr() == buffer.data_ptr() else buffer.copy_(x)
