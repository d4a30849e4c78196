"""Log-probs, ratios and KL terms of one token each, kept from turning a gradient into NaN.

A ratio ``exp(x)`` beyond the range of float32 is infinite, and its gradient times zero, such as a mask, an
advantage or a coefficient, is NaN, which reaches every weight. These functions change such tokens alone; all
other values and gradients keep their bits. Tensors are ``[n]``, one number per token of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...errors import InvalidInputError
from ..vocab.arguments import check_floats

KlEstimator = Literal["k1", "k2", "k3"]
#: float32 ends at ``e^88.7``. A factor of up to 6,000, such as an advantage, must not carry a ratio past it.
MAX_LOG_RATIO = 80.0
#: What a greater log-ratio counts as, without a gradient; miles bounds log-ratios by the same number (#1363).
BOUND = 20.0


def counted_tokens(reduce: Callable[[Tensor], Tensor], n: int, device: torch.device) -> Tensor:
    """Return at which tokens the gradient of a linear reduction ``[n] -> []`` is not zero."""
    # A checkpoint around the loss, whose hooks these take the place of, must not recompute for this backward.
    with torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
        ones_n = torch.ones(n, device=device, requires_grad=True)
        total = reduce(ones_n)
        if not isinstance(total, Tensor) or not total.requires_grad:  # there are no samples
            return torch.ones(n, dtype=torch.bool, device=device)
        return torch.autograd.grad(total, ones_n)[0] != 0


def finite_where_masked(values_n: Tensor, counted_n: Tensor) -> Tensor:
    """Return the values, with zeros in place of ``inf`` and ``nan`` at tokens that are not counted."""
    return torch.where(counted_n | values_n.isfinite(), values_n, 0.0)


def comparable_where_masked(log_probs: list[Tensor], counted_n: Tensor) -> list[Tensor]:
    """Return log-probs under several policies, all 0 where a token is not counted and a ratio overflows."""
    overflows_n = ~counted_n & _overflows(log_probs)
    return [torch.where(overflows_n, 0.0, values_n) for values_n in log_probs]


def kept_near(log_probs_n: Tensor, others: list[Tensor], counted_n: Tensor) -> Tensor:
    """Return the log-probs in training, constant where a token is not counted and a ratio overflows.

    Such a token gets the first of the other log-probs, which :func:`comparable_where_masked` returned.
    """
    constant_n = others[0] if others else torch.zeros_like(log_probs_n)
    overflows_n = ~counted_n & _overflows([log_probs_n, *others])
    return torch.where(overflows_n, constant_n.to(log_probs_n.dtype), log_probs_n)


def near_old(log_probs_n: Tensor, old_n: Tensor) -> Tensor:
    """Return log-probs whose ratios to the old ones do not overflow; bounded ones have no gradient."""
    bounded_n = (old_n.detach() + BOUND).to(log_probs_n.dtype)
    return torch.where(log_probs_n - old_n > MAX_LOG_RATIO, bounded_n, log_probs_n)


def bounded_kl_arguments(
    log_probs_n: Tensor, base_n: Tensor, importance_ratio_n: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the arguments of the estimator k3, bounded where its value would overflow.

    That is where ``importance_ratio * exp(base - log_probs)`` does; a bounded token has no gradient.
    """
    log_ratio_n = (base_n - log_probs_n).detach().float()
    if importance_ratio_n is not None:
        log_ratio_n = log_ratio_n + importance_ratio_n.detach().float().log().clamp(min=0)
    overflows_n = log_ratio_n > MAX_LOG_RATIO
    if importance_ratio_n is not None:
        smaller_n = importance_ratio_n.detach().clamp(max=math.exp(BOUND))
        importance_ratio_n = torch.where(overflows_n, smaller_n, importance_ratio_n)
    log_probs_n = torch.where(overflows_n, -BOUND, log_probs_n)
    return log_probs_n, torch.where(overflows_n, 0.0, base_n), importance_ratio_n


def _overflows(log_probs: list[Tensor]) -> Tensor:
    """Return where some log-prob is not finite, or some ratio of two of them overflows."""
    stacked = torch.stack([values_n.detach().float() for values_n in log_probs])
    distance_n = stacked.amax(0) - stacked.amin(0)
    return ~((distance_n <= MAX_LOG_RATIO) & stacked.isfinite().all(0))


def estimate_kl(log_ratio: Tensor, estimator: KlEstimator) -> Tensor:
    """Return an estimate of KL(p, q) per token, in nats.

    The estimators are Schulman's (joschu.net/blog/kl-approx.html), with ``d = log p - log q``:

    ==========  ====================  ====================================================================
    ``"k1"``    ``d``                 unbiased; for monitoring, as its gradient is zero on average
    ``"k2"``    ``d**2 / 2``          biased; on average its gradient is that of the divergence
    ``"k3"``    ``exp(-d) - 1 + d``   unbiased and never negative; the penalty of GRPO, arXiv 2402.03300
    ==========  ====================  ====================================================================

    Below ``d = -20`` k3 goes on as its tangent, with the gradient ``1 - e**20``. So neither value nor
    gradient overflows (except in float16), and descent moves p towards q, however far apart they are.

    ``log_ratio`` is ``d`` of tokens drawn from p; the estimates have its shape and floating dtype. Another
    estimator raises :class:`InvalidInputError`.
    """
    check_floats(log_ratio=log_ratio)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator != "k3":
        raise InvalidInputError(f"estimator is {estimator!r}; it must be one of {get_args(KlEstimator)}")
    bounded = clamped(log_ratio, -BOUND, math.inf)
    # relu() and not clamp(): at the bound itself the gradient must come from one of the two terms only.
    beyond = torch.relu(-BOUND - log_ratio)
    return torch.expm1(-bounded) + bounded + math.expm1(BOUND) * beyond


def clamped(x: Tensor, low: float, high: float) -> Tensor:
    """Clamp with a gradient of one at the bounds; that of ``clamp()`` is one or zero, by torch's release."""
    return torch.where(x < low, low, torch.where(x > high, high, x))
