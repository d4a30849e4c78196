"""Top-k of all ranks' logits, and the autograd function of log-probabilities at given ids and of the tail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import _ownership, _topk_local
from ._function import DifferentiableOnce, all_gather, saved_tensors
from ._shard import Shard
from ._topk_local import Gradients, Ids


@dataclass(frozen=True)
class Options:
    tp_group: dist.ProcessGroup | None
    rank: int
    loan: _ownership.Loan | None  # of the logits' storage, to be overwritten with the gradient


def topk(shard: Shard, k: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Ids ``[n, k]``, their log-probabilities ``[n, k]``, and the tail's ``[n]``, the same on all ranks."""
    width = shard.logits.shape[1]
    logits, columns, tail = _topk_local.largest(shard, min(k, width))
    # Bits of integers in the place of floats: one collective takes one dtype.
    integers = torch.int64 if shard.dtype == torch.float64 else torch.int32
    everywhere = all_gather(torch.cat([logits, columns.to(integers).view(shard.dtype), tail.T], dim=1), group)
    logits, columns, tail = torch.split(everywhere, [*columns.shape[1:], *columns.shape[1:], 2], dim=-1)

    indices = logits.new_empty((shard.n, k), dtype=torch.int64)
    log_probs = logits.new_empty((shard.n, k))
    log_tail = logits.new_empty(shard.n)
    starts = torch.arange(len(logits), device=logits.device)[:, None, None] * width
    for block in _blocks(shard, columns.shape[2] * len(columns)):
        ids = columns[:, block].contiguous().view(integers) + starts
        # The ranks one after another: of equal logits the lowest id stays first.
        candidates, order = _ranks_side_by_side(logits[:, block]).sort(dim=1, descending=True, stable=True)
        indices[block] = _ranks_side_by_side(ids).gather(1, order[:, :k])
        highest = candidates[:, :1].double()
        z = (candidates.double() - highest) / shard.temperature
        tails = _log_masses(tail[:, block].unbind(2), highest, shard.temperature)
        log_total, log_tail[block] = _total_and_tail(z[:, :k], torch.cat([z[:, k:], tails], 1))
        log_probs[block] = z[:, :k] - log_total
    return indices, log_probs, log_tail


def _ranks_side_by_side(values: Tensor) -> Tensor:
    """``[tp, rows, k]`` as ``[rows, tp * k]``."""
    return values.movedim(0, 1).flatten(1)


class LogProbsAt(torch.autograd.Function):
    """See :func:`.topk.vocab_parallel_log_probs_at`."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, shard: Shard, indices: Tensor, options: Options
    ) -> tuple[Tensor, Tensor]:
        """``indices`` ``[n, K]``, negative for none."""
        ctx.set_materialize_grads(False)
        ids = Ids(indices, options.rank * logits.shape[1])
        log_probs, tail_here = _topk_local.statistics(shard, ids)  # logits as yet
        tail = _sum_over_ranks(log_probs, tail_here, options)
        highest_logit = tail.new_empty(shard.n)
        log_total = tail.new_empty(shard.n, dtype=torch.float64)
        log_tail, tail_share = torch.empty_like(log_total), torch.empty_like(log_total)
        for block in _blocks(shard, indices.shape[1]):
            at_ids = log_probs[block].masked_fill(indices[block] < 0, float("-inf"))
            highest = torch.maximum(at_ids.amax(1), tail[:, 0, block].amax(0))[:, None].double()
            z = (at_ids.double() - highest) / shard.temperature
            inside = z.masked_fill(_repeated_or_none(indices[block]), float("-inf"))
            outside = _log_masses(tail[:, :, block].unbind(1), highest, shard.temperature)
            total, log_tail[block] = _total_and_tail(inside, outside)
            highest_logit[block], log_total[block] = highest.squeeze(1), total.squeeze(1)
            tail_share[block] = _share(tail[:, :, block], options.rank, shard.temperature)
            log_probs[block] = (z - total).masked_fill(indices[block] < 0, float("-inf"))

        numbers, ctx.slice = (None, shard.rows) if isinstance(shard.rows, slice) else (shard.rows, None)
        ctx.shard_options = shard.temperature, shard.block_bytes
        ctx.options, ctx.start = options, ids.start
        statistics = tail_here[0], tail_share, highest_logit, log_total, log_tail
        ctx.save_for_backward(logits, indices, numbers, *statistics)
        return log_probs, log_tail.to(shard.dtype)

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_log_tail: Tensor | None) -> tuple[Any, ...]:
        gradient = None
        if grad_log_probs is not None or grad_log_tail is not None:
            logits, *saved = saved_tensors(ctx)
            with torch.no_grad():
                gradient = LogProbsAt._gradient(ctx, logits, saved, grad_log_probs, grad_log_tail)
            if torch.is_grad_enabled():  # create_graph=True
                gradient = DifferentiableOnce.apply(  # type: ignore[no-untyped-call]
                    gradient, logits, grad_log_probs, grad_log_tail
                )
        return gradient, None, None, None

    @staticmethod
    def _gradient(
        ctx: Any,
        logits: Tensor,
        saved: list[Any],
        grad_log_probs: Tensor | None,
        grad_log_tail: Tensor | None,
    ) -> Tensor:
        indices, numbers, tail_top, tail_share, highest, log_total, log_tail = saved
        shard = Shard(logits, ctx.slice if numbers is None else numbers, None, *ctx.shard_options)
        zero = tail_top.new_zeros(())
        g = zero.expand(indices.shape) if grad_log_probs is None else grad_log_probs
        h = zero if grad_log_tail is None else grad_log_tail
        h = torch.where(log_tail == float("-inf"), zero, h)  # of nothing
        in_place = ctx.options.loan is not None
        flows = ((g != 0) & (indices >= 0)).any(1) | (h != 0)
        gradients = Gradients(tail_top, tail_share, highest, log_total, log_tail, g, h, flows)
        gradient = _topk_local.gradient(shard, Ids(indices, ctx.start), gradients, in_place)
        if in_place:
            _ownership.note_overwritten(logits)
        return gradient


def _blocks(shard: Shard, k: int) -> list[slice]:
    """For a handful of float64 and int64 temporaries ``[rows, k]``."""
    return shard.blocks(buffers=16, width=k)


def _log_masses(top_and_rest: Sequence[Tensor], highest: Tensor, temperature: float) -> Tensor:
    """``log(sum(exp((x - highest) / temperature)))`` of each rank's others, float64 ``[rows, tp]``."""
    top, rest = (values.T.double() for values in top_and_rest)
    return (top - highest) / temperature + rest.log1p()


def _share(tails: Tensor, rank: int, temperature: float) -> Tensor:
    """Of a rank's largest logit in all tails ``[tp, 2, rows]``: its probability there, ``[rows]``."""
    highest = tails[:, 0].amax(0)[:, None].double()
    log_masses = _log_masses(tails.unbind(1), highest, temperature)
    return ((tails[rank, 0].double() - highest[:, 0]) / temperature - log_masses.logsumexp(1)).exp()


def _total_and_tail(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms of the sum of all ``[rows, 1]`` and of the outside's part ``[rows]``, from such of parts."""
    log_inside, log_outside = (part.logsumexp(1, keepdim=True) for part in (inside, outside))
    # Not the difference of two logarithms, for a tail next to 1.
    log_tail = torch.nn.functional.logsigmoid(log_outside - log_inside)
    return torch.logaddexp(log_inside, log_outside), log_tail.squeeze(1)


def _sum_over_ranks(logits: Tensor, tail: Tensor, options: Options) -> Tensor:
    """Fill in the logits ``[n, K]`` of ids on other ranks; the tails ``[2, n]`` of all: ``[tp, 2, n]``.

    One collective: zeros are added to what one rank alone has, so all have its bits.
    """
    if options.tp_group is None or (size := dist.get_world_size(options.tp_group)) == 1:
        return tail[None]
    sent = torch.cat([logits.flatten(), logits.new_zeros(size * tail.numel())])
    tails = sent[logits.numel() :].view(size, *tail.shape)
    tails[options.rank] = tail
    dist.all_reduce(sent, group=options.tp_group)
    logits.copy_(sent[: logits.numel()].view_as(logits))
    return tails.clone()


def _repeated_or_none(indices: Tensor) -> Tensor:
    """Whether an id stands at another place of its row as well, and was counted there; or is none."""
    ids, order = indices.sort(1)
    repeated = ids < 0
    repeated[:, 1:] |= ids[:, 1:] == ids[:, :-1]
    return torch.empty_like(repeated).scatter_(1, order, repeated)
