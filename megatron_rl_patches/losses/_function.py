"""The autograd function of log-probabilities and entropy: a few numbers per row are all that it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InvalidInputError
from . import _local, _ownership
from ._shard import Shard, Target, Term, floor


@dataclass(frozen=True)
class Options:
    tp_group: dist.ProcessGroup | None
    fused: bool | str
    entropy: bool
    entropy_grad: bool
    loan: _ownership.Loan | None  # of the logits' storage, to be overwritten with the gradient


class _Softmax(NamedTuple):
    """Of each row over the whole vocabulary, ``[n]`` each, with ``z = (x - top) / temperature``."""

    top: Tensor
    share: Tensor  # exp(z) of this rank's largest logit
    total: Tensor  # sum(exp(z))
    mean: Tensor | None  # sum(p * z)

    def term(
        self, grad_log_prob: Tensor | None, grad_entropy: Tensor | None, temperature: float
    ) -> Term | None:
        """``-p * (grad_log_prob + grad_entropy * (z - mean)) / temperature``, for all but the target."""
        a = b = None
        if grad_log_prob is not None:
            a = -grad_log_prob / (temperature * self.total)
        if grad_entropy is not None:
            assert self.mean is not None
            b = -grad_entropy / (temperature * self.total)
            a = -b * self.mean if a is None else a - b * self.mean
        if a is None:
            return None
        return Term(self.top[:, None], self.share[:, None], a[:, None], None if b is None else b[:, None])


class _Rows(NamedTuple):
    """What backward needs beside the logits and the softmaxes."""

    keep_mask: Tensor | None
    numbers: Tensor | None
    column: Tensor
    counts: Tensor
    target_logit: Tensor
    log_prob: Tensor


class LogProbsAndEntropy(torch.autograd.Function):
    """See :func:`.vocab_parallel.vocab_parallel_log_probs_and_entropy`."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, shard: Shard, column: Tensor, counts: Tensor, options: Options
    ) -> tuple[Tensor, Tensor | None]:
        """``column`` ``[n]`` is the target among this rank's columns or -1; ``counts`` ``[n]`` is bool."""
        ctx.set_materialize_grads(False)
        here = _local.statistics(shard, column[:, None], options.entropy, options.fused)
        target_logit = logits[shard.row_numbers(), column.clamp(min=0)].to(shard.dtype)
        target_logit = torch.where(column < 0, float("-inf"), target_logit)

        everywhere = all_gather(torch.cat([*here, target_logit[None]]), options.tp_group)
        *parts, target_logits = torch.split(everywhere, [*map(len, here), 1], dim=1)
        rank = 0 if options.tp_group is None else dist.get_rank(options.tp_group)
        found = [_combine(part, rank, shard.temperature) for part in parts]
        target_logit = target_logits.amax((0, 1))

        softmax, log_total = found[0]
        log_prob = torch.where(counts, (target_logit - softmax.top) / shard.temperature - log_total, 0.0)
        log_prob = log_prob.to(shard.dtype)
        entropy = None
        if options.entropy:
            softmax, log_total = found[-1]
            assert softmax.mean is not None
            entropy = torch.where(counts, log_total - softmax.mean, 0.0).to(shard.dtype)
            if not options.entropy_grad:
                ctx.mark_non_differentiable(entropy)
                found = found[:1]

        numbers, ctx.slice = (None, shard.rows) if isinstance(shard.rows, slice) else (shard.rows, None)
        ctx.shard_options = shard.temperature, shard.block_bytes
        ctx.options = options
        rows = _Rows(shard.keep_mask, numbers, column, counts, target_logit.to(shard.dtype), log_prob)
        saved = [
            value if value is None else value.to(shard.dtype) for softmax, _ in found for value in softmax
        ]
        ctx.save_for_backward(logits, *rows, *saved)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        gradient = None
        if grad_log_prob is not None or grad_entropy is not None:
            logits, *saved = saved_tensors(ctx)
            with torch.no_grad():
                gradient = LogProbsAndEntropy._gradient(ctx, logits, saved, grad_log_prob, grad_entropy)
            if torch.is_grad_enabled():  # create_graph=True
                gradient = DifferentiableOnce.apply(  # type: ignore[no-untyped-call]
                    gradient, logits, grad_log_prob, grad_entropy
                )
        return gradient, None, None, None, None

    @staticmethod
    def _gradient(
        ctx: Any,
        logits: Tensor,
        rest: list[Any],
        grad_log_prob: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> Tensor:
        rows, first, last = _Rows(*rest[:6]), _Softmax(*rest[6:10]), _Softmax(*rest[-4:])
        shard = Shard(
            logits, ctx.slice if rows.numbers is None else rows.numbers, rows.keep_mask, *ctx.shard_options
        )
        temperature = shard.temperature

        if rows.keep_mask is None:
            kept, full = None, first.term(grad_log_prob, grad_entropy, temperature)
        else:
            kept = first.term(grad_log_prob, None, temperature)
            full = last.term(None, grad_entropy, temperature)
        at_target = torch.zeros_like(rows.log_prob)
        flows = torch.zeros_like(rows.counts)
        if grad_log_prob is not None:
            flows |= grad_log_prob != 0
            at_target -= grad_log_prob * rows.log_prob.expm1()  # 1 - p, of a p that may be next to 1
        if grad_entropy is not None:
            assert last.mean is not None
            flows |= grad_entropy != 0
            z = ((rows.target_logit - last.top) / temperature).clamp(min=floor(shard.dtype))
            at_target -= grad_entropy * (z.exp() / last.total) * (z - last.mean)

        # Rows that a loss mask leaves out may hold NaN, and zero times NaN is NaN.
        counts = rows.counts & flows
        at_target = torch.where(counts, at_target / temperature, 0.0)
        target = Target(rows.column[:, None], at_target[:, None], counts[:, None])
        in_place = ctx.options.loan is not None
        gradient = _local.gradient(shard, kept, full, target, in_place, ctx.options.fused)
        if in_place:
            _ownership.note_overwritten(logits)
        return gradient


class DifferentiableOnce(torch.autograd.Function):
    """The gradient itself, tied to what it was computed from.

    ``once_differentiable`` lets a gradient pass for a constant where the weights of the loss are constants.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor | None) -> Tensor:
        return gradient

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise InvalidInputError(
            "the gradient of a vocabulary-parallel loss cannot be differentiated twice: second "
            "derivatives need torch.log_softmax"
        )


def _combine(part: Tensor, rank: int, temperature: float) -> tuple[_Softmax, Tensor]:
    """The softmax over all ranks, and ``log(total)``, from the statistics of each: ``[tp, 2 or 3, n]``.

    In float64, where it costs nothing, and in the same order on every rank, so that all get the same bits.
    """
    top, rest, *moment = part.double().unbind(1)
    highest = top.amax(0)
    z = (top - highest) / temperature
    share = z.exp()
    # total - 1: the largest term, which is 1, would swallow the digits of the others.
    others = (share * rest).sum(0) + (share.sum(0) - 1.0)
    mean = None
    if moment:
        z = z.clamp(min=floor(z.dtype))
        mean = (share * (moment[0] + z * (1.0 + rest))).sum(0) / (1.0 + others)
    # A rank without the NaN or +inf of a row has a share of zero there, and would leave its columns out.
    share_here = torch.where(others.isnan(), others, share[rank])
    return _Softmax(highest, share_here, 1.0 + others, mean), others.log1p()


def all_gather(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """``[k, n]`` of every rank, ``[tp, k, n]``."""
    if group is None or (size := dist.get_world_size(group)) == 1:
        return values[None]
    gathered = values.new_empty((size * len(values), *values.shape[1:]))
    dist.all_gather_into_tensor(gathered, values, group=group)
    return gathered.view(size, *values.shape)


def saved_tensors(ctx: Any) -> tuple[Any, ...]:
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        raise InvalidInputError(
            "the logits were overwritten after forward, so that their gradient cannot be computed: by an "
            "inplace_backward (this is a second backward, or another loss of these logits), or by some "
            f"operation in place. Autograd says: {error}"
        ) from error
