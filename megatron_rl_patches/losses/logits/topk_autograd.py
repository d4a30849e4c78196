"""Top-k of all ranks' logits, and the autograd function of log-probabilities at given ids and of the tail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import topk_blocks
from .autograd import gradients_of_inputs, save_source, without_autocast
from .collectives import all_gather
from .options import VocabParallelOptions
from .overwriting import StorageClaim
from .rows import Inputs, LogitSource, SelectedRows, Tile, reduced
from .softmax import merge
from .topk_blocks import Gradients, Ids


@without_autocast
def topk(source: LogitSource, k: int, options: VocabParallelOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids ``[n, k]``, their log-probabilities ``[n, k]`` and the tail's ``[n]``."""
    local = reduced(_largest_of_tiles(source, k, options), partial(_merged_largest, k=k, options=options))
    gathered = all_gather(local, options.tp_group).unbind()
    indices = local.new_empty((source.n, k), dtype=torch.int64)
    log_probs, log_tail = local.new_empty((source.n, k)), local.new_empty(source.n)
    for block in _blocks(log_probs, len(local) * len(gathered), options):
        parts = [of_rank[:, block].double() for of_rank in gathered]
        for rank, part in enumerate(parts):
            part[_candidates(part) : -2] += rank * source.width
        merged = _merged_largest(parts, k, options)
        logits, ids, tail = merged[:k], merged[k : 2 * k], merged[-2:]
        z = ((logits - logits[:1]) / options.temperature).T
        log_tail_n1 = _log_masses(tail[:, None].unbind(), logits[:1].T, options.temperature)
        log_total, log_tail[block] = _total_and_tail(z, log_tail_n1)
        indices[block], log_probs[block] = ids.T, z - log_total
    return indices, log_probs, log_tail


def _largest_of_tiles(
    source: LogitSource, k: int, options: VocabParallelOptions
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows, and the logits, columns and tail of :func:`.topk_blocks.largest`, of each tile.

    They are one tensor ``[2 * candidates + 2, rows]``. Its dtype holds columns exactly up to 16 million.
    """
    for tile in source.tiles():
        most = min(k, tile.columns.stop - tile.columns.start)
        logits, columns, tail = topk_blocks.largest(tile.logits, most, options.temperature)
        columns = (columns + tile.columns.start).to(logits.dtype)
        yield tile.rows, torch.cat([logits.T, columns.T, tail])


def _candidates(part: Tensor) -> int:
    return len(part) // 2 - 1


def _merged_largest(parts: Sequence[Tensor], k: int, options: VocabParallelOptions) -> Tensor:
    """Merge what :func:`_largest_of_tiles` yields; a candidate that another one displaces moves to the tail.

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
    tail = _merged_tail([*(part[-2:] for part in parts), *singles], options.temperature)
    return torch.cat([logits[:, :k].T, columns.gather(1, order)[:, :k].T, tail])


class LogProbsAt(torch.autograd.Function):
    """The autograd function of log-probabilities at ids and of the tail, see :mod:`.topk`."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        source: LogitSource,
        indices: Tensor,
        options: VocabParallelOptions,
        claim: StorageClaim,
        *inputs: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """``indices`` are ``[n, K]``, negative for none."""
        ctx.set_materialize_grads(False)
        parts = _statistics_of_tiles(source, indices, options)
        local = reduced(parts, partial(_merged_statistics, temperature=options.temperature))
        # Until the loop, log_probs holds the logits at the ids.
        log_probs, local_tail = local[:-2].T.contiguous(), local[-2:].clone()
        tail = _sum_over_ranks(log_probs, local_tail, options, claim)
        max_logit = tail.new_empty(source.n)
        log_sum_exp = tail.new_empty(source.n, dtype=torch.float64)
        log_tail, tail_max_weight = torch.empty_like(log_sum_exp), torch.empty_like(log_sum_exp)
        for block in _blocks(log_probs, indices.shape[1], options):
            at_ids = log_probs[block].masked_fill(indices[block] < 0, float("-inf"))
            highest = torch.maximum(at_ids.amax(1), tail[:, 0, block].amax(0))[:, None].double()
            z = (at_ids.double() - highest) / options.temperature
            inside = z.masked_fill(_repeated_or_none(indices[block]), float("-inf"))
            outside = _log_masses(tail[:, :, block].unbind(1), highest, options.temperature)
            total, log_tail[block] = _total_and_tail(inside, outside)
            max_logit[block], log_sum_exp[block] = highest.squeeze(1), total.squeeze(1)
            tail_max_weight[block] = _weight_in_tail(tail[:, :, block], options)
            log_probs[block] = (z - total).masked_fill(indices[block] < 0, float("-inf"))

        ctx.options, ctx.claim = options, claim
        of_rows = {
            "tail_max": local_tail[0],
            "tail_max_weight": tail_max_weight,
            "max_logit": max_logit,
            "log_sum_exp": log_sum_exp,
            "log_tail": log_tail,
        }
        save_source(ctx, source, {"indices": indices, **of_rows})
        # The caller may change the returned tensors, so none of them is a saved tensor.
        return log_probs, log_tail.to(source.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_log_tail: Tensor | None) -> tuple[Any, ...]:
        gradients = gradients_of_inputs(ctx, _gradients, grad_log_probs, grad_log_tail)
        return (None,) * 4 + gradients


def _statistics_of_tiles(
    source: LogitSource, indices: Tensor, options: VocabParallelOptions
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows and :func:`.topk_blocks.statistics` of each tile, ``[K + 2, rows]``."""
    for tile in source.tiles():
        ids = _ids_in_tile(indices, tile, options, source)
        logits, tail = topk_blocks.statistics(tile.logits, ids, options.temperature)
        yield tile.rows, torch.cat([logits.T, tail])


def _merged_statistics(parts: Sequence[Tensor], temperature: float) -> Tensor:
    tail = _merged_tail([part[-2:] for part in parts], temperature)
    return torch.cat([torch.stack([part[:-2] for part in parts]).sum(0), tail])


def _merged_tail(parts: Sequence[Tensor], temperature: float) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    tail = merge(torch.stack([part.double() for part in parts]), temperature).to(parts[0].dtype)
    tail[1].masked_fill_(tail[0] == float("-inf"), 0.0)
    return tail


def _ids_in_tile(indices: Tensor, tile: Tile, options: VocabParallelOptions, source: LogitSource) -> Ids:
    return Ids(indices[tile.rows], options.tp_rank * source.width + tile.columns.start)


def _gradients(
    ctx: Any,
    source: LogitSource,
    saved: dict[str, Tensor],
    grad_log_probs: Tensor | None,
    grad_log_tail: Tensor | None,
) -> Inputs:
    indices, log_tail = saved.pop("indices"), saved["log_tail"]
    options: VocabParallelOptions = ctx.options
    zero = saved["tail_max"].new_zeros(())
    g = zero.expand(indices.shape) if grad_log_probs is None else grad_log_probs
    h = zero if grad_log_tail is None else grad_log_tail
    h = torch.where(log_tail == float("-inf"), zero, h)  # an empty tail is constant
    has_grad = ((g != 0) & (indices >= 0)).any(1) | (h != 0)
    gradients = Gradients(**saved, g=g, h=h, has_grad=has_grad)

    def of_tile(tile: Tile, in_place: bool) -> Tensor:
        ids = _ids_in_tile(indices, tile, options, source)
        part = Gradients(*(value[tile.rows] for value in gradients))
        return topk_blocks.gradient(tile.logits, ids, part, options.temperature, in_place)

    return source.gradients(of_tile, ctx.needs_input_grad[4:])


def _blocks(values: Tensor, k: int, options: VocabParallelOptions) -> list[slice]:
    """Cut ``n`` rows such that a handful of float64 and int64 temporaries ``[rows, k]`` fit into a block."""
    return SelectedRows(values, slice(0, len(values)), options.block_bytes).blocks(buffers=16, width=k)


def _log_masses(tails: Sequence[Tensor], max_logit: Tensor, temperature: float) -> Tensor:
    """Return ``log(sum(exp((x - max_logit) / T)))`` of each rank's tail, float64 ``[rows, tp]``."""
    tail_max, sum_exp_minus_1 = (values.T.double() for values in tails)
    return (tail_max - max_logit) / temperature + sum_exp_minus_1.log1p()


def _weight_in_tail(tails: Tensor, options: VocabParallelOptions) -> Tensor:
    """Return the probability of this rank's largest tail logit within all tails ``[tp, 2, rows]``."""
    max_logit = tails[:, 0].amax(0)[:, None].double()
    log_masses = _log_masses(tails.unbind(1), max_logit, options.temperature)
    z = (tails[options.tp_rank, 0].double() - max_logit[:, 0]) / options.temperature
    return (z - log_masses.logsumexp(1)).exp()


def _total_and_tail(ids: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log of the sum of all, ``[rows, 1]``, and the log of the tail's part of it, ``[rows]``.

    ``ids`` and ``tail`` ``[rows, any]`` are the logs of the terms inside and outside of the ids.
    """
    log_ids, log_tail = (part.logsumexp(1, keepdim=True) for part in (ids, tail))
    # A difference of two logarithms would lose the digits of a tail near 1.
    log_share = torch.nn.functional.logsigmoid(log_tail - log_ids)
    return torch.logaddexp(log_ids, log_tail), log_share.squeeze(1)


def _sum_over_ranks(
    logits: Tensor, tail: Tensor, options: VocabParallelOptions, claim: StorageClaim
) -> Tensor:
    """Fill in the logits ``[n, K]`` at ids of other ranks, and return the tails of all, ``[tp, 2, n]``.

    This is one all-reduce. Each number comes from one rank and zeros from the others, so that all ranks have
    the same bits.
    """
    size = options.tp_size
    marker = claim.marker(logits, int(claim.asked_for))
    if size == 1:
        if claim.asked_for:
            claim.check(marker)
        return tail[None]
    sent = torch.cat([logits.flatten(), logits.new_zeros(size * (tail.numel() + len(marker)))])
    tails, markers = torch.split(sent[logits.numel() :], [size * tail.numel(), size * len(marker)])
    tails.view(size, *tail.shape)[options.tp_rank] = tail
    markers.view(size, -1)[options.tp_rank] = marker
    dist.all_reduce(sent, group=options.tp_group)
    if claim.asked_for:
        claim.check(markers)
    logits.copy_(sent[: logits.numel()].view_as(logits))
    return tails.view(size, *tail.shape).clone()


def _repeated_or_none(indices: Tensor) -> Tensor:
    """Return a mask of the entries that must not be counted, bool ``[n, K]``.

    These are negative ids, and all but one occurrence of an id that its row contains several times.
    """
    ids, order = indices.sort(1)
    repeated = ids < 0
    repeated[:, 1:] |= ids[:, 1:] == ids[:, :-1]
    return torch.empty_like(repeated).scatter_(1, order, repeated)
