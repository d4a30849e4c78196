"""The k most probable tokens of logits split over the vocabulary, and the probability of all others together.

The others, the *tail*, are summed over the vocabulary, in the same pass: ``log(1 - sum of p of the k)`` has
no digit left in float32 once the tail is 1e-7. Their statistics are relative to the tail's largest logit, so
that they keep all digits where the k have next to all of the probability. Tensor parallel ranks exchange what
belongs to k ids once, and never the vocabulary. (slime#2033 gathers the vocabulary to select.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import InvalidInputError
from .arguments import VocabParallelOptions, check_integer
from .autograd import all_gather_statistics, without_autocast
from .blocks import COMPILED_BLOCKS, Block, each_block, rows_of_block
from .distributions import TopKDistribution
from .rows import LogitSource, SelectedRows, Tile, ranges, rows_of
from .slices import Rows
from .softmax import block_statistics, exp, finite, merge, scaled_, sum_of_rows

_MINUS_INF = float("-inf")
_SMALLEST_GROUP, _LARGEST_GROUP = 4, 16
# Plain operators take the tail's largest logit from the selection. On a CPU this saves more than compiling.
_COMPILED_ON = {"cuda"}
BLOCKS_WITH_MASK = 4  # on a GPU, times the size of other blocks, since they have a mask of their size


@torch.no_grad()
def vocab_parallel_topk(
    logits: Tensor,
    k: int,
    *,
    tp_group: dist.ProcessGroup | None = None,
    rows: Rows = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    block_bytes: int | None = None,
) -> TopKDistribution:
    """Return the k most probable tokens of each selected row, in descending order; ties go to the lowest ids.

    One all-gather over ``tp_group``: two numbers per candidate and two for the tail, ``8 * k + 8`` bytes per
    row and rank in float32, and eight bytes per rank. No autograd graph.

    Args:
        logits: ``[T, V / tp]``; ``tp_group``, ``rows``, ``temperature``, ``vocab_size`` and ``block_bytes``
            too are those of :func:`vocab_parallel_log_probs`.
        k: number of tokens, from 1 to the size of the vocabulary.

    Returns:
        The distributions of ``n`` tokens, in float32 (float64 for float64 logits), the same bits on all ranks
        of ``tp_group``. A row with NaN or +inf has any ids, each once, and NaN for all log-probabilities.

    Raises:
        InvalidInputError: arguments do not fit; raised on every rank alike and before the collective.
    """
    options = VocabParallelOptions(
        tp_group=tp_group, temperature=temperature, vocab_size=vocab_size, block_bytes=block_bytes
    )
    source = rows_of(logits, rows, options)
    if source.device.type == "meta":
        raise InvalidInputError("logits are on the device meta, where they have no values: pass real ones")
    size = options.num_ids(source.width)
    k = check_integer("k", k, 1, f"from 1 to {size}, the size of the vocabulary", highest=size)
    return TopKDistribution(*_topk(source, k), temperature=options.temperature, vocab_size=size)


@without_autocast
def _topk(source: LogitSource, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids ``[n, k]``, their log-probabilities ``[n, k]`` and the tail's ``[n]``."""
    options = source.options
    local = source.reduce(partial(_largest_of_tile, k), partial(_merged_largest, k, options.scale))
    has = _candidates(local)
    if missing := min(k, source.width) - has:  # this rank has fewer ids than others, and sends as many
        filler = local.new_full((missing, source.n), _MINUS_INF)
        local = torch.cat([local[:has], filler, local[has:-2], torch.zeros_like(filler), local[-2:]])
    gathered, divisors = all_gather_statistics(local, options)
    indices = local.new_empty((source.n, k), dtype=torch.int64)
    log_probs, log_tail = local.new_empty((source.n, k)), local.new_empty(source.n)
    for block in blocks_of_rows(log_probs, len(local) * len(gathered), options):
        parts = [of_rank[:, block].double() for of_rank in gathered]
        for rank, part in enumerate(parts):
            part[_candidates(part) : -2] += rank * source.width
            for logits in (part[: _candidates(part)], part[-2]):
                logits /= divisors[rank]
        merged = _merged_largest(k, options.temperature, parts)
        logits, ids, tail = merged[:k], merged[k : 2 * k], merged[-2:]
        z = ((logits - logits[:1]) / options.temperature).T
        log_tail_n1 = log_masses(tail[:, None].unbind(), logits[:1].T, options.temperature)
        log_total, log_tail[block] = total_and_tail(z, log_tail_n1)
        indices[block], log_probs[block] = ids.T, z - log_total
    return indices, log_probs, log_tail


def _largest_of_tile(k: int, tile: Tile) -> Tensor:
    """Return the logits, columns and tail of :func:`_largest` as one tensor ``[2 * candidates + 2, rows]``.

    Its dtype holds columns exactly up to 16 million.
    """
    most = min(k, tile.columns.stop - tile.columns.start)
    logits, columns, tail = _largest(tile.logits, most)
    columns = (columns + tile.columns.start).to(logits.dtype)
    return torch.cat([logits.T, columns.T, tail])


def _candidates(part: Tensor) -> int:
    return len(part) // 2 - 1


def _merged_largest(k: int, scale: float, parts: Sequence[Tensor]) -> Tensor:
    """Merge what :func:`_largest_of_tile` returns; a candidate that another one displaces moves to the tail.

    Parts come in the order of their columns, so of equal logits the lowest column stays first.
    """
    counts = list(map(_candidates, parts))
    pairs = list(zip(parts, counts, strict=True))
    logits = torch.cat([part[:count] for part, count in pairs]).T
    columns = torch.cat([part[count:-2] for part, count in pairs]).T
    logits, order = logits.sort(dim=1, descending=True, stable=True)
    displaced = logits[:, k:].T
    # Each displaced logit is a tail of one term.
    singles = torch.stack([displaced, torch.zeros_like(displaced)], 1).unbind()
    tail = merged_tail([*(part[-2:] for part in parts), *singles], scale)
    return torch.cat([logits[:, :k].T, columns.gather(1, order)[:, :k].T, tail])


def _largest(rows: SelectedRows, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ``k`` largest logits of each row.

    Returns:
        Logits ``[n, k]`` and their columns ``[n, k]``, from the largest on, equal ones from the lowest column
        on; and of all others ``(max_logit, sum_exp_minus_1)`` ``[2, n]``, see :func:`.softmax.statistics`.
    """
    width = rows.width
    logits = rows.logits.new_empty((rows.n, k), dtype=rows.dtype)
    columns = torch.empty_like(logits, dtype=torch.int64)
    tail = logits.new_zeros((2, rows.n))
    divisor = rows.temperature()

    def of_block(block: Block) -> None:
        of_rows, x = block.rows, block.x.view(-1, width)
        if block.is_compiled:
            logits[of_rows], columns[of_rows] = _largest_in_groups(x, k)
            in_tail = torch.ones(x.shape, dtype=torch.bool, device=x.device)
            in_tail.scatter_(1, columns[of_rows], False)
            [values] = block.function(block.x, [(block.cut(in_tail), False)], divisor)
            tail[0, of_rows], tail[1, of_rows] = values
            return
        # One more than is asked for, which is the largest of the tail.
        top, top_columns = _largest_in_groups(x, min(k + 1, width))
        logits[of_rows], columns[of_rows] = top[:, :k], top_columns[:, :k]
        tail[0, of_rows] = top[:, k] if k < width else _MINUS_INF
        z = torch.sub(x, finite(tail[0, of_rows])[:, None], out=block.work[0])
        z.scatter_(1, top_columns, _MINUS_INF)
        tail[1, of_rows] = sum_of_rows(exp(scaled_(z, divisor), out=z))

    scale = COMPILED_BLOCKS if rows.device.type in _COMPILED_ON else 0
    each_block(rows, block_statistics, of_block, buffers=1, scale=scale, scale_on_gpu=BLOCKS_WITH_MASK)
    # torch.topk does not say which of equal logits it takes for the last places. It had a choice where the
    # tail still has such a logit. The statistics of the tail do not depend on the choice.
    _take_lowest_columns(rows, logits, columns, (tail[0] == logits[:, -1]).nonzero().squeeze(1))
    columns, order = columns.sort(1)
    logits, order = logits.gather(1, order).sort(dim=1, descending=True, stable=True)
    return logits, columns.gather(1, order), tail


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
    part = SelectedRows(rows.logits, rows.numbers()[chosen], rows.options)

    def take_lowest(block: Block) -> None:
        numbers = chosen[block.rows]
        lowest = logits[numbers, -1:]
        row, column = block.function(block.x, lowest).nonzero(as_tuple=True)
        places = (logits[numbers] == lowest).sum(1)
        tied = row.bincount(minlength=len(numbers))
        # The rank of each tied logit within its row, from the lowest column on.
        number = torch.arange(len(row), device=row.device) - (tied.cumsum(0) - tied)[row]
        taken = number < places[row]
        row, column, number = row[taken], column[taken], number[taken]
        columns[numbers[row], k - places[row] + number] = column

    each_block(part, torch.eq, take_lowest, buffers=2, has_work=False)


# --- the tail


def merged_tail(parts: Sequence[Tensor], temperature: float) -> Tensor:
    """Return the statistics ``[2, n]`` of several tails together, as :func:`_largest` returns them."""
    if len(parts) == 1:
        return parts[0]
    tail = merge(torch.stack([part.double() for part in parts]), temperature).to(parts[0].dtype)
    tail[1].masked_fill_(tail[0] == _MINUS_INF, 0.0)
    return tail


def log_masses(tails: Sequence[Tensor], max_logit: Tensor, temperature: float) -> Tensor:
    """Return ``log(sum(exp((x - max_logit) / T)))`` of each rank's tail, float64 ``[rows, tp]``."""
    tail_max, sum_exp_minus_1 = (values.T.double() for values in tails)
    return (tail_max - max_logit) / temperature + sum_exp_minus_1.log1p()


def total_and_tail(ids: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log of the sum of all, ``[rows, 1]``, and the log of the tail's part of it, ``[rows]``.

    ``ids`` and ``tail`` ``[rows, any]`` are the logs of the terms inside and outside of the ids.
    """
    log_ids, log_tail = (part.logsumexp(1, keepdim=True) for part in (ids, tail))
    # A difference of two logarithms would lose the digits of a tail near 1.
    log_share = torch.nn.functional.logsigmoid(log_tail - log_ids)
    return torch.logaddexp(log_ids, log_tail), log_share.squeeze(1)


def blocks_of_rows(values: Tensor, k: int, options: VocabParallelOptions) -> list[slice]:
    """Cut ``n`` rows such that a handful of float64 and int64 temporaries ``[rows, k]`` fit into a block."""
    row_bytes = 16 * k * max(values.element_size(), 4)
    return ranges(0, len(values), rows_of_block(values, options, row_bytes))
