"""Log-probabilities of an output layer that is frozen: backward needs no logits.

The gradient of a row's hidden state is linear in the gradient of its log-probability. So forward, which has
the logits at hand, computes the derivative ``[n, h]``, and backward multiplies it::

    d log_prob / d hidden = sum over columns of d log_prob / dx * weight[column]

A tile contributes ``exp(z) @ weight`` with ``z`` relative to the largest logit so far. The sum is scaled when
a tile with a larger one comes. An entropy would need a second such product, and gain nothing by it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from . import softmax
from .head import HeadLogits, add_product
from .options import VocabParallelOptions
from .rows import Inputs, LogitSource, Tile
from .softmax import SoftmaxGradient, TargetGradient


class LogProbDerivative:
    """Sums over this rank's columns but the target's, from which :meth:`finish` computes the derivative.

    ``_exp`` holds the sums of ``exp(z) * weight[column]`` with ``z`` relative to ``_max_logit``.
    """

    def __init__(self, head: HeadLogits, options: VocabParallelOptions) -> None:
        self._head, self._options = head, replace(options, inplace_backward=True)
        weight = head.weight
        self._max_logit = weight.new_full((head.n,), float("-inf"), dtype=torch.float64)
        self._exp = weight.new_zeros((head.n, weight.shape[1]), dtype=head.dtype)

    @classmethod
    def of(
        cls, source: LogitSource, keep_mask: Tensor | None, options: VocabParallelOptions
    ) -> LogProbDerivative | None:
        """Return empty sums, or ``None`` if backward must compute the logits again."""
        differentiates_entropy = options.with_entropy and options.entropy_grad
        if not isinstance(source, HeadLogits) or not source.is_frozen:
            return None
        return None if differentiates_entropy or keep_mask is not None else cls(source, options)

    def add(self, tile: Tile, max_logit: Tensor, column: Tensor) -> None:
        """Add a tile, which is overwritten.

        Args:
            max_logit: the largest logit of each of its rows, float64.
            column: the target's column in the tile, -1 where it has none.
        """
        rows = tile.rows
        highest = torch.maximum(self._max_logit[rows], max_logit)
        reference = highest.clamp(min=torch.finfo(self._head.dtype).min)
        shift = (self._max_logit[rows] - reference) / self._options.temperature
        shift.clamp_(min=softmax.exp_floor(torch.float64))  # it is -inf before the first tile
        self._max_logit[rows] = highest
        self._exp[rows] *= shift.exp().to(self._exp.dtype)[:, None]
        max_logit_n1 = reference.to(self._exp.dtype)[:, None]
        ones = torch.ones_like(max_logit_n1)
        weights = softmax.gradient(
            tile.logits,
            SoftmaxGradient(max_logit_n1, ones),
            None,
            TargetGradient(column[:, None], torch.zeros_like(ones)),
            None,
            ones.bool(),
            self._options,
        )
        add_product(self._exp[rows], weights, self._head.weight.detach()[tile.columns], may_round=True)

    def finish(self, local_target: Tensor, max_logit: Tensor, sum_exp: Tensor, log_prob: Tensor) -> Tensor:
        """Return this rank's part of d log_prob / d hidden, ``[n, h]``.

        Args:
            local_target: ``[n]``, a column of this rank or -1.
            max_logit: statistics over the whole vocabulary, as ``sum_exp`` and ``log_prob``, float64 ``[n]``.
        """
        temperature, dtype = self._options.temperature, self._exp.dtype
        scale = ((self._max_logit - max_logit) / temperature).exp() / (sum_exp * temperature)
        target_row = self._head.weight.detach()[local_target.clamp(min=0)].to(dtype)
        at_target = torch.where(local_target >= 0, -log_prob.expm1() / temperature, 0.0)
        return target_row * at_target.to(dtype)[:, None] - self._exp * scale.to(dtype)[:, None]


def apply_derivative(
    source: LogitSource, valid: Tensor, derivative: Tensor, grad_log_prob: Tensor | None
) -> Inputs:
    """Return the gradients of the inputs from the derivative ``[n, h]`` of the log-probabilities."""
    assert isinstance(source, HeadLogits)
    if grad_log_prob is None:
        return None, None, None
    # A row without a gradient may hold NaN.
    has_grad = (valid & (grad_log_prob != 0))[:, None]
    return source.spread(torch.where(has_grad, grad_log_prob[:, None] * derivative, 0.0)), None, None
