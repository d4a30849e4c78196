"""Divergences of a student's next-token distributions from a teacher's, known at k ids and a tail.

Every function takes the student's log-probabilities ``[n, k]`` and those of its tail ``[n]``, through which
the gradient flows, and a :class:`TopKDistribution` of the teacher *at the same ids*. It returns the
divergence of each token, ``[n]``, in nats. Other shapes raise :class:`InvalidInputError`. ``p`` are the
student's and ``q`` the teacher's probabilities of the k + 1 buckets, which are the ids and the tail:

======================================  ==================================================  ================
:func:`reverse_kl`                      sum p (log p - log q)                               arXiv 2601.19897
:func:`forward_kl`                      sum q (log q - log p)                               arXiv 1503.02531
:func:`jensen_shannon`                  b KL(q, m) + (1 - b) KL(p, m), m = b q + (1 - b) p  arXiv 2306.13649
:func:`generalized_kl`                  sum p (log p - log q) - p + q, over the ids only    arXiv 2606.30406
:func:`importance_weighted_reverse_kl`  sum p_old r (log p_old - log q), r = p / p_old      slime#2033
======================================  ==================================================  ================

The first three are zero where the buckets agree, never larger than the same divergence over the whole
vocabulary (data-processing inequality), and equal to it if k is the size of the vocabulary. They are summed
as ``p log(p / q) - p + q`` per bucket: the added terms cancel in the sum and make each bucket's part
non-negative, and value and gradient exactly zero where ``p`` and ``q`` have the same bits.

A log-probability of -inf counts as -10,000: a bucket that both rule out adds nothing, one that only the
teacher rules out costs 10,000 times the student's probability instead of infinity, and no gradient is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidInputError
from ..logits.divergence import RULED_OUT
from .topk_distribution import TopKDistribution


def reverse_kl(log_probs: Tensor, tail_log_prob: Tensor, teacher: TopKDistribution) -> Tensor:
    """Return ``KL(p, q) = sum p (log p - log q)`` per token, ``[n]``: mode-seeking.

    Averaged over tokens that the student sampled, value and gradient are unbiased for the divergence of the
    buckets at the states that the student visits. The gradient ignores how the student gets there.
    """
    log_p, log_q = _buckets(log_probs, tail_log_prob, teacher)
    return _relative_entropy(log_p, log_q).sum(1)


def forward_kl(log_probs: Tensor, tail_log_prob: Tensor, teacher: TopKDistribution) -> Tensor:
    """Return ``KL(q, p) = sum q (log q - log p)`` per token, ``[n]``: mass-covering.

    Up to a constant it is the cross entropy with the teacher's buckets. It is unbiased for the states that
    the student visits, as :func:`reverse_kl` is; classical distillation lets the teacher sample instead.
    """
    log_p, log_q = _buckets(log_probs, tail_log_prob, teacher)
    return _relative_entropy(log_q, log_p).sum(1)


def jensen_shannon(
    log_probs: Tensor, tail_log_prob: Tensor, teacher: TopKDistribution, beta: float = 0.5
) -> Tensor:
    """Return ``beta KL(q, m) + (1 - beta) KL(p, m)``, ``m = beta q + (1 - beta) p``, per token, ``[n]``.

    It is at most log 2. This is the generalization of GKD: divided by ``beta`` it tends to the forward KL as
    ``beta`` goes to 0, and divided by ``1 - beta`` to the reverse KL as ``beta`` goes to 1. It is unbiased
    for the states that the student visits, as :func:`reverse_kl` is.

    Raises:
        InvalidInputError: ``beta`` is not between 0 and 1, or shapes differ.
    """
    check_beta(beta)
    log_p, log_q = _buckets(log_probs, tail_log_prob, teacher)
    # log m is computed from the larger of the two, so that it has the same bits as both where they are equal.
    from_p = log_p + torch.log1p(beta * (log_q - log_p).clamp(max=0.0).expm1())
    from_q = log_q + torch.log1p((1.0 - beta) * (log_p - log_q).clamp(max=0.0).expm1())
    log_m = torch.where(log_q > log_p, from_q, from_p)
    return (beta * _relative_entropy(log_q, log_m) + (1.0 - beta) * _relative_entropy(log_p, log_m)).sum(1)


def generalized_kl(log_probs: Tensor, tail_log_prob: Tensor, teacher: TopKDistribution) -> Tensor:
    """Return ``sum of p log(p / q) - p + q`` over the k ids only, per token, ``[n]``.

    This is equation 5 of MOPD, which sums over the *teacher's* top-k. It is :func:`reverse_kl` without the
    part of the tail, hence a lower bound of it: probability that the student puts outside the ids costs
    nothing. ``tail_log_prob`` is ignored; it is an argument so that all divergences have the same signature.
    """
    log_p, log_q = _buckets(log_probs, tail_log_prob, teacher)
    return _relative_entropy(log_p, log_q)[:, :-1].sum(1)


def importance_weighted_reverse_kl(
    log_probs: Tensor, tail_log_prob: Tensor, teacher: TopKDistribution, old: TopKDistribution
) -> Tensor:
    """Return ``sum p_old r (log p_old - log q)`` with ``r = p / p_old`` per token, ``[n]``.

    Its gradient is the policy gradient with the advantage ``log q - log p_old``, whose expectation over the k
    + 1 buckets is exact instead of sampled. ``old`` are distributions of the policy that sampled, at the same
    ids. While the student is that policy, value and gradient are those of :func:`reverse_kl`. Later it is the
    expected advantage under the student, may be negative, and does not stop at the teacher.
    """
    log_p, log_q, log_old = _buckets(log_probs, tail_log_prob, teacher, old)
    return (log_p.exp() * (log_old - log_q)).sum(1)  # no ratio, since p_old r is p


def opd_advantages(log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """Return ``log q - log p`` of sampled tokens, as advantages for a policy loss, without gradient.

    Both log-probs are those of the tokens that the student sampled; shapes that differ raise
    :class:`InvalidInputError`. The result is the negative k1 estimate of the reverse KL (Thinking Machines
    2025, "On-policy distillation"). The policy gradient with it is unbiased for the gradient of the reverse
    KL over the whole vocabulary, with the variance of a single sample. A top-k divergence must not be used as
    an advantage: it does not depend on the sampled token, so the policy learns nothing from it (miles#2410).
    """
    if log_probs.shape != teacher_log_probs.shape:
        raise InvalidInputError(
            f"log_probs are {list(log_probs.shape)}, teacher_log_probs {list(teacher_log_probs.shape)}: "
            "expected those of the same sampled tokens"
        )
    return (_finite(teacher_log_probs) - _finite(log_probs)).detach()


def check_beta(beta: float) -> None:
    if not 0 < beta < 1:
        raise InvalidInputError(
            f"beta is {beta}, expected a number between 0 and 1; at the ends the divergence is zero: use "
            "forward_kl for 0, reverse_kl for 1"
        )


class _RelativeEntropy(torch.autograd.Function):
    """Compute ``p (log p - log q) - p + q`` from log-probabilities, with accurate gradients near zero."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, log_q: Tensor) -> Tensor:
        ctx.save_for_backward(log_p, log_q)
        return log_p.exp() * (log_p - log_q) + _difference(log_q, log_p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        log_p, log_q = ctx.saved_tensors
        grad_p = grad * log_p.exp() * (log_p - log_q) if ctx.needs_input_grad[0] else None
        return grad_p, grad * _difference(log_q, log_p) if ctx.needs_input_grad[1] else None


_relative_entropy: Callable[[Tensor, Tensor], Tensor] = _RelativeEntropy.apply


def _difference(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return ``exp(log_a) - exp(log_b)``, also accurate where both are nearly the same."""
    gap = log_a - log_b
    from_b = log_b.exp() * gap.clamp(max=0.0).expm1()
    return torch.where(gap > 0, -log_a.exp() * (-gap).clamp(max=0.0).expm1(), from_b)


def _buckets(log_probs: Tensor, tail_log_prob: Tensor, *others: TopKDistribution) -> list[Tensor]:
    """Return the finite log-probabilities of ids and tail, ``[n, k + 1]``, in the student's dtype."""
    for other in others:
        if other.log_probs.shape != log_probs.shape:
            raise InvalidInputError(
                f"the student's log_probs are {list(log_probs.shape)}, the teacher's or old policy's "
                f"{list(other.log_probs.shape)}: expected those of the same tokens at the same indices"
            )
    pairs = [(log_probs, tail_log_prob), *((other.log_probs, other.tail_log_prob) for other in others)]
    return [_finite(torch.cat([ids, tail[:, None]], 1)).to(log_probs.dtype) for ids, tail in pairs]


def _finite(log_probs: Tensor) -> Tensor:
    return torch.where(log_probs == -math.inf, RULED_OUT, log_probs)
