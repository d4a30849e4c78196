"""How far a student's next-token distribution is from a teacher's, of which k tokens and a tail are known.

Everything is per token: from the student's log-probabilities ``[n, k]`` and its tail's ``[n]``, which carry
the gradient, and a :class:`TopKDistribution` of a teacher *at the same ids*, which does not, to ``[n]`` in
nats. With ``p`` of the student, ``q`` of the teacher, and sums over the k + 1 buckets, ids and tail:

======================================  ==================================================  ================
:func:`reverse_kl`                      sum p (log p - log q)                               arXiv 2601.19897
:func:`forward_kl`                      sum q (log q - log p)                               arXiv 1503.02531
:func:`jensen_shannon`                  b KL(q, m) + (1 - b) KL(p, m), m = b q + (1 - b) p  arXiv 2306.13649
:func:`generalised_kl`                  sum p (log p - log q) - p + q, over the ids only    arXiv 2606.30406
:func:`importance_weighted_reverse_kl`  sum p_old r (log p_old - log q), r = p / p_old      slime#2033
======================================  ==================================================  ================

The first three are divergences of coarse-grained distributions: zero where the buckets agree, never above
what they are over the whole vocabulary (data processing), and the same where k is all of it. The terms
``- p + q``, which add up to zero over the buckets, make every bucket's own part non-negative, with a value
and a gradient that are exactly zero where ``p`` and ``q`` have the same bits. Nothing is clamped: what is
negative is rounding, 1e-12 at most in float32.

A log-probability of -inf counts as -10,000. So a bucket that neither has adds nothing, one that only the
teacher rules out costs 10,000 times its probability rather than infinity, and no gradient is NaN.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidInputError
from .topk_distribution import TopKDistribution

_RULED_OUT = -1e4


def reverse_kl(log_probs: Tensor, tail_log_prob: Tensor, teacher: TopKDistribution) -> Tensor:
    """``KL(p, q) = sum p (log p - log q)``: mode-seeking, what the student does should be the teacher's too.

    On tokens that the student sampled, the mean over tokens is unbiased for the divergence per token of the
    coarse-grained distributions at the states that the student visits, and so is the gradient, given these
    states. It is not the gradient of how they come about.
    """
    log_p, log_q = _buckets(log_probs, tail_log_prob), _buckets_of(teacher, log_probs)
    return _relative_entropy(log_p, log_q).sum(1)


def forward_kl(log_probs: Tensor, tail_log_prob: Tensor, teacher: TopKDistribution) -> Tensor:
    """``KL(q, p) = sum q (log q - log p)``: mass-covering, what the teacher does should be the student's too.

    Up to a constant it is the cross entropy with the teacher's buckets. Unbiased as :func:`reverse_kl` is;
    to be so for the teacher's own states, as in classical distillation, the tokens must be the teacher's.
    """
    log_p, log_q = _buckets(log_probs, tail_log_prob), _buckets_of(teacher, log_probs)
    return _relative_entropy(log_q, log_p).sum(1)


def jensen_shannon(
    log_probs: Tensor, tail_log_prob: Tensor, teacher: TopKDistribution, beta: float = 0.5
) -> Tensor:
    """``beta KL(q, m) + (1 - beta) KL(p, m)`` with ``m = beta q + (1 - beta) p``: bounded, by log 2 at most.

    As generalised in GKD, where divided by ``beta`` it tends to the forward KL for ``beta`` to 0, and divided
    by ``1 - beta`` to the reverse KL for ``beta`` to 1. Unbiased as :func:`reverse_kl` is.
    """
    check_beta(beta)
    log_p, log_q = _buckets(log_probs, tail_log_prob), _buckets_of(teacher, log_probs)
    # From the larger of the two on: exactly that where they are equal.
    from_p = log_p + torch.log1p(beta * (log_q - log_p).clamp(max=0.0).expm1())
    from_q = log_q + torch.log1p((1.0 - beta) * (log_p - log_q).clamp(max=0.0).expm1())
    log_m = torch.where(log_q > log_p, from_q, from_p)
    return (beta * _relative_entropy(log_q, log_m) + (1.0 - beta) * _relative_entropy(log_p, log_m)).sum(1)


def generalised_kl(log_probs: Tensor, tail_log_prob: Tensor, teacher: TopKDistribution) -> Tensor:
    """``sum of p log(p / q) - p + q`` over the k ids alone: no bucket for the tail, and non-negative still.

    As in MOPD, equation 5, there over the *teacher's* top-k. It is :func:`reverse_kl` without the tail's
    part, so a lower bound of it, and unbiased only for what the ids contribute: what the student does outside
    them costs nothing. ``tail_log_prob`` is not used, but taken, so that all have one signature.
    """
    log_p, log_q = _buckets(log_probs, tail_log_prob), _buckets_of(teacher, log_probs)
    return _relative_entropy(log_p, log_q)[:, :-1].sum(1)


def importance_weighted_reverse_kl(
    log_probs: Tensor, tail_log_prob: Tensor, teacher: TopKDistribution, old: TopKDistribution
) -> Tensor:
    """``sum p_old r (log p_old - log q)`` with the importance ratio ``r = p / p_old``.

    The policy gradient of the advantage ``log q - log p_old``, with the expectation over k + 1 buckets taken
    exactly rather than by a sample. While the student is the old policy, value and gradient are those of
    :func:`reverse_kl`; after that it is unbiased for the expected advantage under the student, and neither
    non-negative nor stationary at the teacher. No ratio is formed, ``p_old r`` being ``p``.
    """
    log_p, log_q = _buckets(log_probs, tail_log_prob), _buckets_of(teacher, log_probs)
    return (log_p.exp() * (_buckets_of(old, log_probs) - log_q)).sum(1)


def opd_advantages(log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """``log q - log p`` of sampled tokens: advantages for a policy loss, without gradient, in any one shape.

    Minus the k1 estimate of the reverse KL (Thinking Machines 2025, "On-policy distillation"): the policy
    gradient with it is unbiased for the gradient of the full reverse KL per token, tail included, at the
    price of its variance. Not the same as a top-k divergence used as an advantage, which does not depend on
    the sampled token and so teaches nothing (miles#2410).
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
    """``p (log p - log q) - p + q`` from log-probabilities, with gradients that vanish as it does."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, log_q: Tensor) -> Tensor:
        ctx.save_for_backward(log_p, log_q)
        return log_p.exp() * (log_p - log_q) + _difference(log_q, log_p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        log_p, log_q = ctx.saved_tensors
        grad_p = grad * log_p.exp() * (log_p - log_q) if ctx.needs_input_grad[0] else None
        return grad_p, grad * _difference(log_q, log_p) if ctx.needs_input_grad[1] else None


def _relative_entropy(log_p: Tensor, log_q: Tensor) -> Tensor:
    return _RelativeEntropy.apply(log_p, log_q)  # type: ignore[no-untyped-call]


def _difference(log_a: Tensor, log_b: Tensor) -> Tensor:
    """``a - b`` with the digits of a small difference."""
    gap = log_a - log_b
    from_b = log_b.exp() * gap.clamp(max=0.0).expm1()
    return torch.where(gap > 0, -log_a.exp() * (-gap).clamp(max=0.0).expm1(), from_b)


def _buckets(log_probs: Tensor, tail_log_prob: Tensor) -> Tensor:
    """``[n, k + 1]``."""
    return _finite(torch.cat([log_probs, tail_log_prob[:, None]], 1))


def _buckets_of(distribution: TopKDistribution, log_probs: Tensor) -> Tensor:
    if distribution.log_probs.shape != log_probs.shape:
        raise InvalidInputError(
            f"the student's log_probs are {list(log_probs.shape)}, the teacher's or old policy's "
            f"{list(distribution.log_probs.shape)}: expected those of the same tokens at the same indices"
        )
    return _buckets(distribution.log_probs, distribution.tail_log_prob).to(log_probs.dtype)


def _finite(log_probs: Tensor) -> Tensor:
    return torch.where(log_probs == -math.inf, _RULED_OUT, log_probs)
