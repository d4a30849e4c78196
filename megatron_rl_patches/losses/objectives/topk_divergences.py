"""Divergences of a student's next-token distributions from a teacher's, known at k ids and a tail.

Every function takes the student's log-probabilities ``[n, k]`` and those of its tail ``[n]``, through which
the gradient flows, and a :class:`TopKDistribution` of the teacher *at the same ids*. It returns the
divergence of each token, ``[n]``, in nats. Other shapes raise :class:`InvalidInputError`. ``p`` are the
student's and ``q`` the teacher's probabilities of the k + 1 buckets, which are the ids and the tail. An id
that a token has twice counts twice: losses refuse it, and these functions, which know no masks, do not.

Divergences are zero where the buckets agree, never larger than the same one over the whole vocabulary
(data-processing inequality), and equal to it if k is its size; :func:`generalized_kl` and
:func:`importance_weighted_reverse_kl` say what holds for them.

A log-probability below -10,000, such as -inf, counts as -10,000: a bucket that both rule out adds nothing,
one that only the teacher rules out costs 10,000 times the student's probability, and no gradient is NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import InvalidInputError
from ..vocab import arguments
from ..vocab.arguments import Rows, VocabParallelOptions
from ..vocab.divergences import RULED_OUT, Compared, Divergence, Normalizer, divergence_named
from ..vocab.sources import rows_of
from ..vocab.topk import TopK
from .distributions import TopKDistribution


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

    One all-gather of ``16 * k + 16`` bytes per row and rank runs over ``tp_group``. No autograd graph.

    Args:
        logits: ``[T, V / tp]``; for this and the others see :func:`vocab_parallel_log_probs`.
        k: number of tokens, from 1 to the size of the vocabulary.

    Returns:
        The distributions of ``n`` tokens, in float32 (float64 for float64 logits), the same bits on all ranks
        of ``tp_group``. A row with NaN or +inf has any ids, each once, and NaN for all log-probabilities.

    Raises:
        InvalidInputError: arguments do not fit; raised on every rank alike and before the collective.
    """
    options = VocabParallelOptions(tp_group, temperature, False, block_bytes, vocab_size=vocab_size)
    source = rows_of(logits, rows, options)
    if source.device.type == "meta":
        raise InvalidInputError("logits are on the device meta, where they have no values: pass real ones")
    size = options.num_ids(source.width)
    k = arguments.check_integer("k", k, 1, f"from 1 to {size}, the size of the vocabulary", highest=size)
    return TopKDistribution(*TopK(k)(source), temperature=options.temperature, vocab_size=size)


def reverse_kl(log_probs: Tensor, tail_log_prob: Tensor, teacher: TopKDistribution) -> Tensor:
    """Return ``KL(p, q) = sum p (log p - log q)`` per token, ``[n]``: mode-seeking.

    Averaged over tokens that the student sampled, value and gradient are unbiased for the divergence of the
    buckets at the states that the student visits. The gradient ignores how the student gets there.
    """
    return bucket_divergence(divergence_named("reverse_kl"), log_probs, tail_log_prob, teacher)


def forward_kl(log_probs: Tensor, tail_log_prob: Tensor, teacher: TopKDistribution) -> Tensor:
    """Return ``KL(q, p) = sum q (log q - log p)`` per token, ``[n]``: mass-covering.

    Up to a constant it is the cross entropy with the teacher's buckets. It is unbiased as :func:`reverse_kl`
    is; classical distillation lets the teacher sample instead.
    """
    return bucket_divergence(divergence_named("forward_kl"), log_probs, tail_log_prob, teacher)


def jensen_shannon(
    log_probs: Tensor, tail_log_prob: Tensor, teacher: TopKDistribution, beta: float = 0.5
) -> Tensor:
    """Return ``beta KL(q, m) + (1 - beta) KL(p, m)``, ``m = beta q + (1 - beta) p``, per token, ``[n]``.

    It is at most log 2, and unbiased as :func:`reverse_kl` is. As in GKD, divided by ``beta`` it tends to the
    forward KL as ``beta`` goes to 0, and divided by ``1 - beta`` to the reverse KL as ``beta`` goes to 1; a
    ``beta`` of 0 or 1 raises :class:`InvalidInputError`.
    """
    return bucket_divergence(divergence_named("jensen_shannon", beta), log_probs, tail_log_prob, teacher)


def generalized_kl(log_probs: Tensor, tail_log_prob: Tensor, teacher: TopKDistribution) -> Tensor:
    """Return ``sum of p log(p / q) - p + q`` over the k ids only, per token, ``[n]``.

    This is equation 5 of MOPD, which sums over the *teacher's* top-k. It is :func:`reverse_kl` without the
    tail, which is ignored, hence a lower bound: probability that the student puts outside the ids is free.
    """
    return bucket_divergence(divergence_named("generalized_kl"), log_probs, tail_log_prob, teacher)


def importance_weighted_reverse_kl(
    log_probs: Tensor, tail_log_prob: Tensor, teacher: TopKDistribution, old: TopKDistribution
) -> Tensor:
    """Return ``sum p_old r (log p_old - log q)`` with ``r = p / p_old`` per token, ``[n]``.

    Its gradient is the policy gradient with the advantage ``log q - log p_old``, whose expectation over the k
    + 1 buckets is exact instead of sampled. ``old`` are distributions of the policy that sampled, at the same
    ids, temperature and vocab_size. While the student is that policy, value and gradient are those of
    :func:`reverse_kl`. Later it may be negative, and does not stop at the teacher.
    """
    divergence = divergence_named("importance_weighted_reverse_kl")
    return bucket_divergence(divergence, log_probs, tail_log_prob, teacher, old)


def bucket_divergence(
    divergence: Divergence,
    log_probs: Tensor,
    tail_log_prob: Tensor,
    teacher: TopKDistribution,
    old: TopKDistribution | None = None,
) -> Tensor:
    """Return the divergence of each token, ``[n]``; some need the ``old`` policy, which sampled."""
    arguments.check_floats(log_probs=log_probs, tail_log_prob=tail_log_prob)
    if log_probs.dim() != 2 or tail_log_prob.shape != log_probs.shape[:1]:
        shapes = f"log_probs are {list(log_probs.shape)} and tail_log_prob {list(tail_log_prob.shape)}"
        raise InvalidInputError(f"{shapes}, expected [n, k] and [n]")
    arguments.check_instance("teacher", teacher, TopKDistribution)
    if divergence.needs_old:
        arguments.check_instance("old", old, TopKDistribution)
    others = [teacher] if old is None else [teacher, old]
    arguments.in_common(others)
    arguments.check_one_device(log_probs=log_probs, tail_log_prob=tail_log_prob, teacher=teacher.log_probs)
    for other in others:
        if other.log_probs.shape != log_probs.shape:
            raise InvalidInputError(
                f"the student's log_probs are {list(log_probs.shape)}, the teacher's or old policy's "
                f"{list(other.log_probs.shape)}: expected those of the same tokens at the same indices"
            )
    student = torch.cat([log_probs, tail_log_prob[:, None]], 1)
    buckets = [torch.cat([one.log_probs, one.tail_log_prob[:, None]], 1).to(student) for one in others]
    return _BucketDivergence.apply(divergence, student, *buckets)  # type: ignore[no-untyped-call]


class _BucketDivergence(torch.autograd.Function):
    """Computes in float64, where rounding costs no digits, from log-probabilities ``[n, k + 1]``."""

    @staticmethod
    def forward(ctx: Any, divergence: Divergence, student: Tensor, *others: Tensor) -> Tensor:
        ctx.divergence = divergence
        ctx.save_for_backward(student, *others)
        value, _ = divergence.terms(_compared(student, *others))
        return (value if divergence.counts_tail else value[:, :-1]).sum(1).to(student.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        compared = _compared(*tensors)
        is_constant = compared.are_ruled_out
        if not ctx.divergence.counts_tail:
            is_constant[:, -1] = True
        derivative = ctx.divergence.derivative(compared, 0.0).masked_fill(is_constant, 0.0)
        return None, (gradient[:, None] * derivative).to(gradient.dtype), *(None,) * (len(tensors) - 1)


def _compared(*log_probs: Tensor) -> Compared:
    buckets = [one.double() for one in log_probs]
    zeros = buckets[0].new_zeros(len(buckets), len(buckets[0]))
    return Compared(buckets, map(Normalizer._make, zip(*Normalizer.of(zeros, zeros.dtype), strict=True)))


def opd_advantages(log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """Return ``log q - log p`` of sampled tokens, as advantages for a policy loss, without gradient.

    Shapes that differ raise :class:`InvalidInputError`. The result is the negative k1 estimate of the reverse
    KL (Thinking Machines 2025, "On-policy distillation"). The policy gradient with it is an unbiased estimate
    of the gradient of the reverse KL over the whole vocabulary, with the variance of one sample. A top-k
    divergence is no advantage: it does not depend on the sampled token, so nothing is learned (miles#2410).
    """
    arguments.check_floats(log_probs=log_probs, teacher_log_probs=teacher_log_probs)
    arguments.check_one_device(log_probs=log_probs, teacher_log_probs=teacher_log_probs)
    if log_probs.shape != teacher_log_probs.shape:
        shapes = f"log_probs are {list(log_probs.shape)}, teacher_log_probs {list(teacher_log_probs.shape)}"
        raise InvalidInputError(f"{shapes}: expected those of the same sampled tokens")
    return (teacher_log_probs.clamp(min=RULED_OUT) - log_probs.clamp(min=RULED_OUT)).detach()
