"""Log-probabilities and entropies of rows of logits, and their gradients, see :mod:`.log_probs`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import softmax
from .autograd import LogitFunction, Tensors, all_gather_statistics
from .rows import Inputs, LogitSource, Tile, reduced
from .softmax import NO_SOFTMAX, RowGradients, SoftmaxGradient, exp_floor
from .tiles import OutputLayerRows, add_product


class Targets(NamedTuple):
    """The token that is scored in each row, and the columns that log-probabilities see beside it."""

    column: Tensor  # [n], of this rank, or -1
    valid: Tensor  # bool [n], whether there is a target
    keep_mask: Tensor | None = None  # bool [n, V / tp]

    @classmethod
    def from_ids(cls, ids: Tensor, keep_mask: Tensor | None, source: LogitSource) -> Targets:
        """Return the targets that have these token ids."""
        valid = ids != source.options.ignore_index
        column = ids - source.options.tp_rank * source.width
        is_local = valid & (column >= 0) & (column < source.width)
        return cls(torch.where(is_local, column, -1), valid, keep_mask)

    def in_tile(self, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """Return the columns of the tile, -1 for those that it does not have, and its part of the mask."""
        column = self.column[tile.rows] - tile.columns.start
        is_inside = (column >= 0) & (column < tile.columns.stop - tile.columns.start)
        mask = None if self.keep_mask is None else self.keep_mask[tile.rows, tile.columns]
        return torch.where(is_inside, column, -1), mask


class LogProbsAndEntropy(LogitFunction):
    """Log-probabilities and entropies of targets; backward gets the inputs and a few numbers per row."""

    def forward(self, source: LogitSource, tensors: Tensors) -> tuple[tuple[Tensor, Tensor | None], Tensors]:
        targets = Targets(**tensors)
        derivative = _FrozenDerivative.if_frozen(source, targets)
        source = source if derivative is None else source.keeping_tiles(False)
        log_prob, entropy, saved = self._scores(source, targets, derivative)
        return (log_prob, entropy), {"keep_mask": targets.keep_mask, **saved}

    def _scores(
        self, source: LogitSource, targets: Targets, derivative: _FrozenDerivative | None
    ) -> tuple[Tensor, Tensor | None, Tensors]:
        """Read all tiles once; one collective.

        Returns:
            Log-probabilities ``[n]``, entropies ``[n]`` if they are wanted, and what :meth:`gradients` needs
            of each row, ``[..., n]`` each.
        """
        options, valid, has_mask = source.options, targets.valid, targets.keep_mask is not None

        def merge(parts: Sequence[Tensor], scale: float = options.scale) -> Tensor:
            """Return the statistics ``[m, n]`` of all columns from those of tiles or ranks."""
            stacked = torch.stack(list(parts)).double()
            merged = [softmax.merge(x, scale) for x in _softmaxes(stacked[:, :-1], has_mask)]
            return torch.cat([*merged, stacked[:, -1].amax(0)[None]])

        local = reduced(self._statistics_of_tiles(source, targets, derivative), merge).to(source.dtype)
        gathered, divisors = all_gather_statistics(local, options, self.claim)
        parts = gathered.double()
        for logits in _logits_in(parts, has_mask):
            logits /= divisors[:, None]
        merged = merge(parts.unbind(), options.temperature)
        softmaxes, target_logit = _softmaxes(merged[:-1], has_mask), merged[-1]
        max_logit, sum_exp_minus_1 = softmaxes[0][:2]
        exact_log_prob = (target_logit - max_logit) / options.temperature - sum_exp_minus_1.log1p()
        for logits in _logits_in(merged, has_mask):
            logits *= options.divisor  # they are compared with the logits that this rank reads
        log_prob = torch.where(valid, exact_log_prob, 0.0).to(source.dtype)
        entropy = None
        if options.with_entropy:
            _, of_all, sum_z_exp = softmaxes[-1]
            entropy = torch.where(valid, of_all.log1p() - sum_z_exp / (1.0 + of_all), 0.0).to(source.dtype)
        if derivative is not None:
            of_log_prob = derivative.finish(targets.column, max_logit, 1.0 + sum_exp_minus_1, exact_log_prob)
            return log_prob, entropy, {"valid": valid, "derivative": of_log_prob}
        of_rows = {
            "column": targets.column,
            "valid": valid,
            "log_prob": log_prob.clone(),  # since the caller may change the returned tensor
            "target_logit": target_logit.to(source.dtype),
            "softmax": _Softmax.stacked(softmaxes[0], source.dtype),
        }
        if len(softmaxes) > 1 and options.entropy_grad:
            of_rows["softmax of the entropy"] = _Softmax.stacked(softmaxes[1], source.dtype)
        return log_prob, entropy, of_rows

    def _statistics_of_tiles(
        self, source: LogitSource, targets: Targets, derivative: _FrozenDerivative | None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows and :func:`.softmax.statistics` with the targets' logits of each tile.

        The logit of a target that is not in the tile is -inf.
        """
        for tile in source.tiles():
            column, mask = targets.in_tile(tile)
            statistics = softmax.statistics(tile.logits, column, mask)
            logit = tile.logits.logits[tile.logits.row_indices, column.clamp(min=0)].double()
            yield tile.rows, torch.cat([*statistics, torch.where(column < 0, float("-inf"), logit)[None]])
            if derivative is not None:
                derivative.add(tile, statistics[-1][0], column)

    def gradients(
        self, source: LogitSource, saved: Tensors, needed: Sequence[bool], *gradients: Tensor | None
    ) -> Inputs:
        valid, (grad_log_prob, grad_entropy) = saved["valid"], gradients
        if "derivative" in saved:
            assert isinstance(source, OutputLayerRows) and grad_log_prob is not None
            # A row without a gradient may hold NaN.
            has_grad = (valid & (grad_log_prob != 0))[:, None]
            of_hidden = torch.where(has_grad, grad_log_prob[:, None] * saved["derivative"], 0.0)
            return source.spread(of_hidden), None, None
        temperature = source.options.scale
        targets = Targets(saved["column"], valid, saved.get("keep_mask"))
        of_log_prob = _Softmax(*saved["softmax"])
        of_entropy = of_log_prob
        if "softmax of the entropy" in saved:
            of_entropy = _Softmax(*saved["softmax of the entropy"])
        if targets.keep_mask is None:
            masked, unmasked = NO_SOFTMAX, of_log_prob.gradient(grad_log_prob, grad_entropy, temperature)
        else:
            masked = of_log_prob.gradient(grad_log_prob, None, temperature)
            unmasked = of_entropy.gradient(None, grad_entropy, temperature)
        at_target, has_grad = torch.zeros_like(saved["log_prob"]), torch.zeros_like(valid)
        if grad_log_prob is not None:
            has_grad |= grad_log_prob != 0
            at_target -= grad_log_prob * saved["log_prob"].expm1()  # 1 - p, accurate when p is near 1
        if grad_entropy is not None:
            assert of_entropy.mean_z is not None
            has_grad |= grad_entropy != 0
            z = (saved["target_logit"] - of_entropy.max_logit) / temperature
            z = z.clamp(min=exp_floor(source.dtype))
            at_target -= grad_entropy * (z.exp() / of_entropy.sum_exp) * (z - of_entropy.mean_z)
        # Rows that a loss mask leaves out may hold NaN, and zero times NaN is NaN.
        has_grad &= valid
        at_target = torch.where(has_grad, at_target / temperature, 0.0)

        of_rows = RowGradients(unmasked, masked, at_target, has_grad)

        def of_tile(tile: Tile, in_place: bool) -> Tensor:
            column, mask = targets.in_tile(tile)
            return softmax.gradient(tile.logits, of_rows.part(tile.rows), column, mask, in_place)

        return source.gradients(of_tile, needed)


class _Softmax(NamedTuple):
    """A softmax of each row over the whole vocabulary, ``[n]`` each, with ``z = (x - max_logit) / T``."""

    max_logit: Tensor
    sum_exp: Tensor  # sum(exp(z))
    mean_z: Tensor | None = None  # sum(p * z), for the entropy

    @staticmethod
    def stacked(statistics: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the two or three of them, ``[2 or 3, n]``, from the statistics of the whole vocabulary."""
        max_logit, sum_exp_minus_1, *sum_z_exp = statistics
        sum_exp = 1.0 + sum_exp_minus_1
        return torch.stack([max_logit, sum_exp, *(total / sum_exp for total in sum_z_exp)]).to(dtype)

    def gradient(
        self, grad_log_prob: Tensor | None, grad_entropy: Tensor | None, temperature: float
    ) -> SoftmaxGradient:
        """Return ``-p * (grad_log_prob + grad_entropy * (z - mean_z)) / T``, right for all but the target."""
        a = b = None
        if grad_log_prob is not None:
            a = -grad_log_prob / (temperature * self.sum_exp)
        if grad_entropy is not None:
            assert self.mean_z is not None
            b = -grad_entropy / (temperature * self.sum_exp)
            a = -b * self.mean_z if a is None else a - b * self.mean_z
        if a is None:
            return NO_SOFTMAX
        return self.max_logit[:, None], a[:, None], None if b is None else b[:, None]


def _softmaxes(statistics: Tensor, has_mask: bool) -> list[Tensor]:
    """Return the statistics of each softmax from all ``[..., m, n]``; those of kept columns come first."""
    size = statistics.shape[-2]
    return list(torch.split(statistics, [2, size - 2] if has_mask and size > 2 else [size], -2))


def _logits_in(statistics: Tensor, has_mask: bool) -> list[Tensor]:
    """Return the logits among all statistics ``[..., m, n]``: the largest ones, and the target's."""
    largest = [of_one.select(-2, 0) for of_one in _softmaxes(statistics[..., :-1, :], has_mask)]
    return [*largest, statistics.select(-2, -1)]


class _FrozenDerivative:
    """The derivative of log-probabilities by the hidden states of an output layer that is frozen.

    The gradient of a row's hidden state is linear in the gradient of its log-probability. So forward, which
    has the logits at hand, computes the derivative ``[n, h]``, and backward only multiplies it::

        d log_prob / d hidden = sum over columns of d log_prob / dx * weight[column]

    A tile contributes ``exp(z) @ weight``, without the target's column, and with ``z`` relative to the
    largest logit so far. The sum is scaled when a tile with a larger one comes. An entropy would need a
    second such product, and gain nothing by it.
    """

    def __init__(self, layer: OutputLayerRows) -> None:
        self._layer, self._temperature = layer, layer.options.scale
        weight = layer.weight
        self._max_logit = weight.new_full((layer.n,), float("-inf"), dtype=torch.float64)
        self._exp = weight.new_zeros((layer.n, weight.shape[1]), dtype=layer.dtype)

    @classmethod
    def if_frozen(cls, source: LogitSource, targets: Targets) -> _FrozenDerivative | None:
        """Return empty sums, or ``None`` if backward must compute the logits again."""
        if not isinstance(source, OutputLayerRows) or not source.is_frozen or targets.keep_mask is not None:
            return None
        return None if source.options.with_entropy and source.options.entropy_grad else cls(source)

    def add(self, tile: Tile, max_logit: Tensor, column: Tensor) -> None:
        """Add a tile, which is overwritten.

        Args:
            max_logit: the largest logit of each of its rows, float64.
            column: the target's column in the tile, -1 where it has none.
        """
        rows = tile.rows
        highest = torch.maximum(self._max_logit[rows], max_logit)
        reference = softmax.finite(highest.to(self._exp.dtype))
        shift = (self._max_logit[rows] - reference) / self._temperature
        shift.clamp_(min=exp_floor(torch.float64))  # it is -inf before the first tile
        self._max_logit[rows] = highest
        self._exp[rows] *= shift.exp().to(self._exp.dtype)[:, None]
        ones = torch.ones_like(reference)
        of_rows = RowGradients(
            (reference[:, None], ones[:, None], None), NO_SOFTMAX, torch.zeros_like(ones), ones.bool()
        )
        weights = softmax.gradient(tile.logits, of_rows, column, None, in_place=True)
        add_product(self._exp[rows], weights, self._layer.weight.detach()[tile.columns], may_round=True)

    def finish(self, local_target: Tensor, max_logit: Tensor, sum_exp: Tensor, log_prob: Tensor) -> Tensor:
        """Return this rank's part of d log_prob / d hidden, ``[n, h]``.

        Args:
            local_target: ``[n]``, a column of this rank or -1.
            max_logit: statistics over the whole vocabulary, as ``sum_exp`` and ``log_prob``, float64 ``[n]``.
        """
        temperature, dtype = self._temperature, self._exp.dtype
        scale = ((self._max_logit - max_logit) / temperature).exp() / (sum_exp * temperature)
        target_row = self._layer.weight.detach()[local_target.clamp(min=0)].to(dtype)
        at_target = torch.where(local_target >= 0, -log_prob.expm1() / temperature, 0.0)
        return target_row * at_target.to(dtype)[:, None] - self._exp * scale.to(dtype)[:, None]
