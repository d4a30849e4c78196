"""Log-probabilities and entropies of an output layer that is frozen: backward needs no logits.

The gradient of a row's hidden state is linear in the gradients of its log-probability and its entropy. So
forward, which has the logits at hand, computes both derivatives ``[n, h]``, and backward multiplies them::

    d log_prob / d hidden = sum over columns of d log_prob / dx * weight[column]

A tile contributes ``exp(z) @ weight``, and ``(z * exp(z)) @ weight`` for the entropy, with ``z`` relative to
the largest logit so far. The sums are scaled when a tile with a larger one comes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from . import softmax
from .head import HeadLogits, add_product
from .options import VocabParallelOptions
from .softmax import SoftmaxGradient, TargetGradient
from .source import LogitSource, Tile


class WholeSoftmax(NamedTuple):
    """Statistics of each row over the whole vocabulary, float64 ``[n]``."""

    max_logit: Tensor
    sum_exp: Tensor
    mean_z: Tensor | None
    log_prob: Tensor
    target_logit: Tensor


class Derivatives:
    """Sums over this rank's columns but the target's, from which :meth:`finish` computes both derivatives.

    ``_exp`` holds the sums of ``exp(z) * weight[column]``, and ``_z_exp`` those of
    ``z * exp(z) * weight[column]``, with ``z`` relative to ``_max_logit``.
    """

    def __init__(self, head: HeadLogits, with_entropy: bool, options: VocabParallelOptions) -> None:
        self._head, self._options = head, replace(options, inplace_backward=True)
        weight = head.weight
        shape = head.n, weight.shape[1]
        self._max_logit = weight.new_full((head.n,), float("-inf"), dtype=torch.float64)
        self._exp = weight.new_zeros(shape, dtype=head.dtype)
        self._z_exp = torch.zeros_like(self._exp) if with_entropy else None

    @classmethod
    def of(
        cls, source: LogitSource, keep_mask: Tensor | None, options: VocabParallelOptions
    ) -> Derivatives | None:
        """Return empty sums, or ``None`` if backward must compute the logits again."""
        if isinstance(source, HeadLogits) and source.is_frozen and keep_mask is None:
            return cls(source, options.with_entropy and options.entropy_grad, options)
        return None

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
        scale, shift = shift.exp().to(self._exp.dtype)[:, None], shift.to(self._exp.dtype)[:, None]
        weight = self._head.weight.detach()[tile.columns]
        ones = torch.ones_like(scale)
        if self._z_exp is not None:
            z_exp = self._z_exp[rows]
            z_exp.addcmul_(self._exp[rows], shift).mul_(scale)
            part = SoftmaxGradient(reference.to(self._exp.dtype)[:, None], torch.zeros_like(ones), ones)
            add_product(z_exp, self._weights(tile, part, column, in_place=False), weight)
        self._exp[rows] *= scale
        part = SoftmaxGradient(reference.to(self._exp.dtype)[:, None], ones)
        # The entropy's derivative is a small difference of these sums.
        rounds = self._z_exp is None
        weights = self._weights(tile, part, column, in_place=True)
        add_product(self._exp[rows], weights, weight, may_round=rounds)

    def _weights(self, tile: Tile, part: SoftmaxGradient, column: Tensor, in_place: bool) -> Tensor:
        nothing = TargetGradient(column[:, None], torch.zeros_like(part.a))
        options = replace(self._options, inplace_backward=in_place)
        every_row = torch.ones_like(part.a, dtype=torch.bool)
        return softmax.gradient(tile.logits, part, None, nothing, None, every_row, options)

    def finish(self, local_target: Tensor, whole: WholeSoftmax) -> tuple[Tensor, Tensor | None]:
        """Return this rank's part of d log_prob / d hidden and d entropy / d hidden, ``[n, h]`` each."""
        temperature, dtype = self._options.temperature, self._exp.dtype
        shift = (self._max_logit - whole.max_logit) / temperature
        local_weight = (shift.exp() / (whole.sum_exp * temperature)).to(dtype)[:, None]
        is_local = local_target >= 0
        target_row = self._head.weight.detach()[local_target.clamp(min=0)].to(dtype)
        at_target = torch.where(is_local, -whole.log_prob.expm1() / temperature, 0.0)
        of_log_prob = target_row * at_target.to(dtype)[:, None] - self._exp * local_weight
        if self._z_exp is None:
            return of_log_prob, None
        assert whole.mean_z is not None
        z = (whole.target_logit - whole.max_logit) / temperature
        at_target = torch.where(is_local, whole.log_prob.exp() * (whole.mean_z - z) / temperature, 0.0)
        of_others = self._z_exp + self._exp * (shift - whole.mean_z).to(dtype)[:, None]
        return of_log_prob, target_row * at_target.to(dtype)[:, None] - of_others * local_weight
