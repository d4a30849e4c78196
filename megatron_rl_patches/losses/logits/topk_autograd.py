"""Top-k of all ranks' logits, and the autograd function of log-probabilities at given ids and of the tail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import topk_blocks
from .autograd import gradients_of_inputs, save_source, without_autocast
from .collectives import all_gather
from .options import VocabParallelOptions
from .overwriting import StorageClaim
from .rows import Inputs, LogitSource, SelectedRows, Tile
from .softmax import merge
from .topk_blocks import Gradients, Ids


@without_autocast
def topk(source: LogitSource, k: int, options: VocabParallelOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids ``[n, k]``, their log-probabilities ``[n, k]`` and the tail's ``[n]``."""
    logits, columns, tail = _largest_of_rank(source, min(k, source.width), options.temperature)
    # Columns travel as the bits of floats, since one collective takes one dtype.
    integers = torch.int64 if source.dtype == torch.float64 else torch.int32
    sent = torch.cat([logits, columns.to(integers).view(source.dtype), tail.T], dim=1)
    gathered = all_gather(sent, options.tp_group)
    logits, columns, tail = torch.split(gathered, [*columns.shape[1:], *columns.shape[1:], 2], dim=-1)

    indices = logits.new_empty((source.n, k), dtype=torch.int64)
    log_probs = logits.new_empty((source.n, k))
    log_tail = logits.new_empty(source.n)
    starts = torch.arange(len(logits), device=logits.device)[:, None, None] * source.width
    for block in _blocks(log_probs, columns.shape[2] * len(columns), options):
        ids = columns[:, block].contiguous().view(integers) + starts
        # Ranks stand side by side in their order, so that of equal logits the lowest id stays first.
        candidates, order = _ranks_side_by_side(logits[:, block]).sort(dim=1, descending=True, stable=True)
        indices[block] = _ranks_side_by_side(ids).gather(1, order[:, :k])
        highest = candidates[:, :1].double()
        z = (candidates.double() - highest) / options.temperature
        tails = _log_masses(tail[:, block].unbind(2), highest, options.temperature)
        log_total, log_tail[block] = _total_and_tail(z[:, :k], torch.cat([z[:, k:], tails], 1))
        log_probs[block] = z[:, :k] - log_total
    return indices, log_probs, log_tail


def _largest_of_rank(source: LogitSource, k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return :func:`.topk_blocks.largest` of all tiles together.

    A candidate that a later tile displaces moves to the tail.
    """
    by_first_row: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for tile in source.tiles():
        width = tile.columns.stop - tile.columns.start
        logits, columns, tail = topk_blocks.largest(tile.logits, min(k, width), temperature)
        columns += tile.columns.start
        if earlier := by_first_row.get(tile.rows.start):
            # Tiles come in the order of their columns, so of equal logits the lowest column stays first.
            logits, order = torch.cat([earlier[0], logits], 1).sort(dim=1, descending=True, stable=True)
            columns = torch.cat([earlier[1], columns], 1).gather(1, order)
            displaced = logits[:, k:].T.double()
            # Each displaced logit is a tail of one term.
            singles = torch.stack([displaced, torch.zeros_like(displaced)], 1)
            tail = _merged_tail([earlier[2], tail, *singles], temperature)
        by_first_row[tile.rows.start] = logits[:, :k], columns[:, :k], tail
    of_logits, of_columns, of_tail = zip(*by_first_row.values(), strict=True)
    return torch.cat(of_logits), torch.cat(of_columns), torch.cat(of_tail, dim=1)


def _ranks_side_by_side(values: Tensor) -> Tensor:
    """Return ``[tp, rows, k]`` as ``[rows, tp * k]``."""
    return values.movedim(0, 1).flatten(1)


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
        # Until the loop, log_probs holds the logits at the ids.
        log_probs, local_tail = _statistics_of_rank(source, indices, options)
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


def _statistics_of_rank(
    source: LogitSource, indices: Tensor, options: VocabParallelOptions
) -> tuple[Tensor, Tensor]:
    """Return :func:`.topk_blocks.statistics` of all tiles together."""
    logits: Tensor | None = None
    tails: dict[int, list[Tensor]] = {}  # of the tiles with the same rows, by the first of these
    for tile in source.tiles():
        at_ids, tail = topk_blocks.statistics(
            tile.logits, _ids_in_tile(indices, tile, options, source), options.temperature
        )
        tails.setdefault(tile.rows.start, []).append(tail)
        if len(at_ids) == source.n and logits is None:
            logits = at_ids
            continue
        if logits is None:
            logits = at_ids.new_zeros(indices.shape)
        logits[tile.rows] += at_ids
    assert logits is not None
    return logits, torch.cat([_merged_tail(parts, options.temperature) for parts in tails.values()], dim=1)


def _merged_tail(parts: list[Tensor], temperature: float) -> Tensor:
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
