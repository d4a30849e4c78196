"""The k most probable tokens of logits split over the vocabulary, and the probability of all others together.

The others, the *tail*, are summed in the same pass, relative to their largest logit, so that all digits stay
where the k have next to all of the probability: ``log(1 - sum of p of the k)`` has none left in float32 once
the tail is 1e-7. Tensor-parallel ranks exchange what belongs to k ids once (slime#2033 gathers all logits).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .arguments import VocabParallelOptions
from .at_ids import BLOCKS_WITH_MASK, total_and_tail
from .reduction import Block, Loss, Read, Results, ranges, rows_of_block
from .softmax import block_statistics, exp, finite, merged, scaled_, sum_of_columns
from .sources import Source, Tensors, Tile

_MINUS_INF = float("-inf")
_SMALLEST_GROUP, _LARGEST_GROUP = 4, 16
# Plain operators take the tail's largest logit from the selection. On a CPU this saves more than compiling.
_COMPILED_ON = {"cuda"}
# A candidate that is none has the logit -inf, and one whose logit is -inf has this one.
_LOWEST = torch.finfo(torch.float64).min


class TopK(Loss):
    """Ids ``[n, k]``, their log-probabilities ``[n, k]`` and the tail's ``[n]``; nothing has a gradient.

    A block of columns adds ``k`` largest logits, their ids, exact in float64, and the tail's maximum and sum.
    """

    def __init__(self, k: int) -> None:
        self.k = k

    def forward(self, sources: Sequence[Source], tensors: Tensors, read: Read) -> Results:
        (source,), k = sources, self.k
        options, scale = source.options, source.scale

        def part(block: Block) -> Tensor:
            x = block.xs[0].flatten(1)
            if block.work is None:
                logits, columns = _largest_in_groups(x, min(k, x.shape[1]))
                in_tail = torch.ones(x.shape, dtype=torch.bool, device=x.device).scatter_(1, columns, False)
                [tail] = block.function(block.xs[0], [(block.cut(in_tail), False)], scale)
            else:
                logits, columns, *tail = _largest_and_tail(x, k, scale, block.work[0])
            return torch.cat([values.double() for values in (logits.T, columns.T, torch.stack([*tail]))])

        def finish_tile(tile: Tile, values: Tensor) -> Tensor:
            """Return candidates by their ids, from the largest logit on, and the tail."""
            size = min(k, tile.x.shape[1])
            logits, columns, tail = values[:size].T, values[size:-2].T, values[-2:]
            # torch.topk does not say which of equal logits it takes for the last places. It had a choice
            # where the tail still has such a logit. The tail's statistics do not depend on the choice.
            tied = (tail[0] == logits[:, -1]).nonzero().squeeze(1)
            _take_lowest_columns(tile, logits, columns, tied, options)
            columns, order = columns.sort(1)
            logits, order = logits.gather(1, order).sort(dim=1, descending=True, stable=True)
            ids = columns.gather(1, order) + (source.first_id + tile.columns.start)
            tail[0] /= options.divisor
            logits = (logits.T / options.divisor).clamp(min=_LOWEST)
            none = logits.new_zeros(k - size, logits.shape[1])
            return torch.cat([logits, none - math.inf, ids.T, none, tail])

        def merge(parts: Sequence[Tensor]) -> Tensor:
            """Merge parts in the order of their columns, so that of equal logits the lowest id is first."""
            logits = torch.cat([part[:k] for part in parts]).T
            ids = torch.cat([part[k:-2] for part in parts]).T
            logits, order = logits.sort(dim=1, descending=True, stable=True)
            displaced = logits[:, k:].T.masked_fill(logits[:, k:].T == _LOWEST, _MINUS_INF)
            # Each candidate that another one displaces is a tail of one term.
            singles = torch.stack([displaced, torch.zeros_like(displaced)], 1).unbind()
            tail = merged([*(part[-2:] for part in parts), *singles], options.temperature)
            return torch.cat([logits[:, :k].T, ids.gather(1, order)[:, :k].T, tail])

        blocks = BLOCKS_WITH_MASK._replace(tensors=1, compiled=int(source.device.type in _COMPILED_ON))
        total = read(block_statistics, part, merge, blocks, finish_tile)
        logits, ids, (tail_max, tail_sum) = total[:k], total[k:-2], total[-2:]
        logits = logits.masked_fill(logits == _LOWEST, _MINUS_INF)
        z = ((logits - logits[:1]) / options.temperature).T
        log_total, log_tail = total_and_tail(z, tail_max - logits[0], tail_sum, options.temperature)
        return [ids.T.long(), (z - log_total).to(source.dtype), log_tail.to(source.dtype)], {}


def _largest_and_tail(
    x: Tensor, k: int, scale: Tensor | None, buffer: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the ``k`` largest logits, their columns, and the largest logit and the sum of all others.

    ``buffer`` ``[rows, stretches, columns]`` is overwritten.
    """
    # One more than is asked for, which is the largest of the tail.
    logits, columns = _largest_in_groups(x, min(k + 1, x.shape[1]))
    tail_max = logits[:, k] if k < x.shape[1] else logits.new_full((len(x),), _MINUS_INF)
    z = torch.sub(x, finite(tail_max)[:, None], out=buffer.flatten(1))
    z.scatter_(1, columns, _MINUS_INF)
    exp(scaled_(z, scale), out=z)
    tail_sum = sum_of_columns(buffer).sum(1, dtype=torch.float64)
    return logits[:, :k], columns[:, :k], tail_max.double(), tail_sum


def _largest_in_groups(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
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
    group_columns, without_group = columns[: size * groups].view(size, groups), columns[size * groups :]
    chosen_columns = group_columns[:, chosen].transpose(0, 1).flatten(1)
    candidates = torch.cat([chosen_columns, without_group.expand(len(x), -1)], 1)
    logits, places = x.gather(1, candidates).topk(k)
    return logits, candidates.gather(1, places)


def _take_lowest_columns(
    tile: Tile, logits: Tensor, columns: Tensor, chosen: Tensor, options: VocabParallelOptions
) -> None:
    """Give the last places of ``chosen`` rows, where logits are equal, the lowest columns that have them.

    The logits ``[n, k]`` are the largest of each row, from the largest on; their columns are changed.
    """
    k, row_bytes, place = logits.shape[1], 2 * tile.x.shape[1] * max(tile.x.element_size(), 4), tile.place
    for rows in ranges(0, len(chosen), rows_of_block(tile.x, options, row_bytes)):
        numbers = chosen[rows]
        lowest = logits[numbers, -1:]
        x = tile.x.index_select(0, numbers + place.start if isinstance(place, slice) else place[numbers])
        row, column = (x.double() == lowest).nonzero(as_tuple=True)
        places = (logits[numbers] == lowest).sum(1)
        tied = row.bincount(minlength=len(numbers))
        # The rank of each tied logit within its row, from the lowest column on.
        number = torch.arange(len(row), device=row.device) - (tied.cumsum(0) - tied)[row]
        taken = number < places[row]
        row, column, number = row[taken], column[taken], number[taken]
        columns[numbers[row], k - places[row] + number] = column.to(columns.dtype)
