"""The autograd functions of log-probabilities and entropies, see :mod:`.log_probs`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import softmax
from .autograd import gradients_of_inputs, save_source, without_autocast
from .deferred import DeferredLogits
from .frozen_head import LogProbDerivative, apply_derivative
from .head import HeadLogits
from .options import VocabParallelOptions
from .overwriting import StorageClaim
from .rows import Inputs, LogitSource, Tile, as_slice, on_device, reduced
from .softmax import SoftmaxGradient, TargetGradient, exp_floor


class _Softmax(NamedTuple):
    """A softmax of each row over the whole vocabulary, ``[n]`` each, with ``z = (x - max_logit) / T``."""

    max_logit: Tensor
    sum_exp: Tensor  # sum(exp(z))
    mean_z: Tensor | None = None  # sum(p * z), for the entropy

    def gradient(
        self, grad_log_prob: Tensor | None, grad_entropy: Tensor | None, temperature: float
    ) -> SoftmaxGradient | None:
        """Return ``-p * (grad_log_prob + grad_entropy * (z - mean_z)) / T``, right for all but the target."""
        a = b = None
        if grad_log_prob is not None:
            a = -grad_log_prob / (temperature * self.sum_exp)
        if grad_entropy is not None:
            assert self.mean_z is not None
            b = -grad_entropy / (temperature * self.sum_exp)
            a = -b * self.mean_z if a is None else a - b * self.mean_z
        if a is None:
            return None
        return SoftmaxGradient(self.max_logit[:, None], a[:, None], None if b is None else b[:, None])


class _Scores(NamedTuple):
    """Log-probabilities and entropies ``[n]``, and what backward needs of each row, ``[n]`` each.

    Where a keep-mask makes the softmax of the entropy another one than that of the log-probabilities,
    ``of_rows`` has its statistics under names that begin with ``entropy_``.
    """

    log_prob: Tensor
    entropy: Tensor | None
    of_rows: dict[str, Tensor | None]


def _scores(
    source: LogitSource,
    local_target: Tensor,
    valid: Tensor,
    keep_mask: Tensor | None,
    options: VocabParallelOptions,
    claim: StorageClaim,
    derivative: LogProbDerivative | None = None,
) -> _Scores:
    """Read all tiles once; one collective.

    Args:
        local_target: ``[n]``, a column of this rank or -1.
        valid: bool ``[n]``, whether there is a target.
    """
    merge = partial(_merged, temperature=options.temperature, has_mask=keep_mask is not None)
    parts = _statistics_of_tiles(source, local_target, keep_mask, options, derivative)
    local = reduced(parts, merge).to(source.dtype)
    *statistics, target_logit = merge(claim.gather(local, options.tp_group).unbind())
    merged = _softmaxes(statistics, keep_mask is not None)
    max_logit, sum_exp_minus_1, *_ = merged[0]
    exact_log_prob = (target_logit - max_logit) / options.temperature - sum_exp_minus_1.log1p()
    log_prob = torch.where(valid, exact_log_prob, 0.0).to(source.dtype)
    entropy = None
    softmaxes = [_softmax(one, source.dtype) for one in merged]
    if options.with_entropy:
        mean_z = merged[-1][2] / (1.0 + merged[-1][1])
        entropy = torch.where(valid, merged[-1][1].log1p() - mean_z, 0.0).to(source.dtype)
        if not options.entropy_grad:
            softmaxes = softmaxes[:1]
    of_rows: dict[str, Tensor | None] = {"valid": valid}
    if derivative is not None:
        of_log_prob = derivative.finish(local_target, max_logit, 1.0 + sum_exp_minus_1, exact_log_prob)
        return _Scores(log_prob, entropy, {**of_rows, "derivative": of_log_prob})
    # The caller may change the returned tensor, so a copy is saved.
    of_rows |= {"local_target": local_target, "log_prob": log_prob.clone()}
    of_rows |= {"target_logit": target_logit.to(source.dtype), **softmaxes[0]._asdict()}
    if len(softmaxes) > 1:
        of_rows |= {f"entropy_{name}": value for name, value in softmaxes[1]._asdict().items()}
    return _Scores(log_prob, entropy, of_rows)


class LogProbsAndEntropy(torch.autograd.Function):
    """The autograd function of log-probabilities and entropies; it keeps the inputs and numbers per row."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        source: LogitSource,
        local_target: Tensor,
        valid: Tensor,
        keep_mask: Tensor | None,
        options: VocabParallelOptions,
        claim: StorageClaim,
        *inputs: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        derivative = LogProbDerivative.of(source, keep_mask, options)
        if derivative is not None and isinstance(source, HeadLogits):
            source = replace(source, keeps_tiles=False)  # backward reads no tiles
        scores = _scores(source, local_target, valid, keep_mask, options, claim, derivative)
        if scores.entropy is not None and not options.entropy_grad:
            ctx.mark_non_differentiable(scores.entropy)
        ctx.options, ctx.claim = options, claim
        save_source(ctx, source, {"keep_mask": keep_mask, **scores.of_rows})
        return scores.log_prob, scores.entropy

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        def compute(
            ctx: Any, source: LogitSource, saved: dict[str, Tensor], *gradients: Tensor | None
        ) -> Inputs:
            if "derivative" in saved:
                return apply_derivative(source, saved["valid"], saved["derivative"], gradients[0])
            return _gradients(source, saved, ctx.options, ctx.needs_input_grad[6:], *gradients)

        return (None,) * 6 + gradients_of_inputs(ctx, compute, grad_log_prob, grad_entropy)


class JointBackward:
    """Scores rows of deferred logits call by call, and computes the gradient of all calls in one pass.

    It is for code that scores sample after sample, where the gradient of each call alone would be as large as
    that of all: a tensor of the size of all logits, or of the weight. Here a call stores its numbers with
    those of the other rows, and autograd adds up the gradients of the results, two numbers per row.
    """

    def __init__(self, logits: DeferredLogits) -> None:
        self._origin = logits.origin
        source = self._origin.all_rows
        self._scored = _ScoredRows(torch.zeros(source.n, dtype=torch.bool))
        #: Zeros ``[T, 2]`` that are added to the log-probability and the entropy of each row.
        self._zeros = _Joined.apply(self._scored, source, *source.inputs)  # type: ignore[no-untyped-call]

    def accepts(self, logits: Tensor, source: LogitSource, options: VocabParallelOptions) -> bool:
        """Return whether a call can be one of those with a common backward.

        Its rows must be new, with numbers in host memory, and its options those of the calls before.
        """
        return (
            isinstance(logits, DeferredLogits)
            and logits.is_deferred
            and logits.origin is self._origin
            and logits.requires_grad
            and torch.is_grad_enabled()
            and not (isinstance(source, HeadLogits) and source.is_frozen)
            and self._scored.options in (None, options)
            and logits.row_numbers.device.type == "cpu"
            and not self._scored.is_scored[logits.row_numbers].any()
        )

    def add(
        self,
        logits: Tensor,
        source: LogitSource,
        local_target: Tensor,
        valid: Tensor,
        options: VocabParallelOptions,
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities and entropies of the rows; see :func:`_scores` for the arguments."""
        assert isinstance(logits, DeferredLogits)
        if isinstance(source, HeadLogits):
            source = replace(source, keeps_tiles=False)  # the common backward reads other tiles
        with torch.no_grad():
            scores = without_autocast(_scores)(source, local_target, valid, None, options, source.claim())
        index = self._scored.add(logits.row_numbers, scores.of_rows, options)
        log_prob, entropy = scores.log_prob + self._zeros[index, 0], scores.entropy
        if entropy is not None and options.entropy_grad:
            entropy = entropy + self._zeros[index, 1]
        return log_prob, entropy


@dataclass(eq=False)
class _ScoredRows:
    """What a common backward needs of all rows, ``[T]`` each; only rows that have been scored count."""

    is_scored: Tensor
    options: VocabParallelOptions | None = None
    of_rows: dict[str, Tensor | None] = field(default_factory=dict)

    def add(
        self, numbers: Tensor, of_rows: dict[str, Tensor | None], options: VocabParallelOptions
    ) -> slice | Tensor:
        """Store the numbers of some rows, and return which these are."""
        self.options = options
        self.is_scored[numbers] = True
        size, index = len(self.is_scored), as_slice(numbers.flatten())
        for name, values in of_rows.items():
            if values is None:
                self.of_rows[name] = None
                continue
            index = index if isinstance(index, slice) else on_device(index, values.device)
            of_all = self.of_rows.setdefault(name, values.new_zeros(size))
            assert of_all is not None
            of_all[index] = values
        return index

    def selected(self) -> tuple[slice | Tensor, dict[str, Tensor | None]]:
        """Return the rows that have been scored, and their numbers."""
        index, values = as_slice(self.is_scored.nonzero().squeeze(1)), self.of_rows
        valid = values["valid"]
        assert valid is not None
        if isinstance(index, Tensor):
            index = on_device(index, valid.device)
        return index, {name: None if value is None else value[index] for name, value in values.items()}


class _Joined(torch.autograd.Function):
    """Returns zeros; from their gradient, two numbers per row, it computes that of the logits."""

    @staticmethod
    def forward(ctx: Any, scored: _ScoredRows, source: LogitSource, *inputs: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.scored = scored
        save_source(ctx, source)
        return torch.zeros((source.n, 2), dtype=source.dtype, device=source.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        return None, None, *gradients_of_inputs(ctx, _joint_gradients, gradient)


def _joint_gradients(ctx: Any, source: LogitSource, saved: dict[str, Any], gradient: Tensor) -> Inputs:
    index, of_rows = ctx.scored.selected()
    options: VocabParallelOptions = ctx.scored.options
    grad_log_prob, grad_entropy = gradient[index].unbind(1)
    return _gradients(
        source.select(index, options.block_bytes),
        of_rows,
        options,
        ctx.needs_input_grad[2:],
        grad_log_prob,
        grad_entropy if options.with_entropy and options.entropy_grad else None,
    )


def _statistics_of_tiles(
    source: LogitSource,
    local_target: Tensor,
    keep_mask: Tensor | None,
    options: VocabParallelOptions,
    derivative: LogProbDerivative | None,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows and :func:`.softmax.statistics` with the targets' logits of each tile.

    The logit of a target that is not in the tile is -inf.
    """
    for tile in source.tiles():
        column = _column_in_tile(local_target, tile)
        mask = None if keep_mask is None else keep_mask[tile.rows, tile.columns]
        statistics = softmax.statistics(tile.logits, column, mask, options)
        selected = tile.logits
        logit = selected.logits[selected.row_indices, column.clamp(min=0)].double()
        yield tile.rows, torch.cat([*statistics, torch.where(column < 0, float("-inf"), logit)[None]])
        if derivative is not None:
            derivative.add(tile, statistics[-1][0], column)


def _softmaxes(statistics: Sequence[Tensor], has_mask: bool) -> list[Sequence[Tensor]]:
    """Return the statistics of each softmax: of the kept columns first, if there is a mask."""
    return [statistics[:2], statistics[2:]] if has_mask and len(statistics) > 2 else [statistics]


def _merged(parts: Sequence[Tensor], temperature: float, has_mask: bool) -> Tensor:
    """Return the statistics ``[m, n]`` of all columns from those of tiles or ranks."""
    *statistics, target_logits = torch.stack(list(parts)).double().unbind(1)
    softmaxes = [torch.stack(one, 1) for one in map(list, _softmaxes(statistics, has_mask))]
    return torch.cat([*(softmax.merge(one, temperature) for one in softmaxes), target_logits.amax(0)[None]])


def _column_in_tile(local_target: Tensor, tile: Tile) -> Tensor:
    """Return the targets of the tile's rows as columns of the tile; -1 where it does not have them."""
    columns = local_target[tile.rows]
    inside = (columns >= tile.columns.start) & (columns < tile.columns.stop)
    return torch.where(inside, columns - tile.columns.start, -1)


def _gradients(
    source: LogitSource,
    saved: dict[str, Any],
    options: VocabParallelOptions,
    needed: Sequence[bool],
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
) -> Inputs:
    keep_mask, local_target = saved.get("keep_mask"), saved["local_target"]
    valid, log_prob = saved["valid"], saved["log_prob"]
    temperature = options.temperature
    of_log_prob = _Softmax(*(saved[name] for name in _Softmax._fields))
    of_entropy = of_log_prob
    if "entropy_max_logit" in saved:
        of_entropy = _Softmax(*(saved[f"entropy_{name}"] for name in _Softmax._fields))

    masked = None
    if keep_mask is None:
        unmasked = of_log_prob.gradient(grad_log_prob, grad_entropy, temperature)
    else:
        masked = of_log_prob.gradient(grad_log_prob, None, temperature)
        unmasked = of_entropy.gradient(None, grad_entropy, temperature)
    at_target = torch.zeros_like(log_prob)
    has_grad = torch.zeros_like(valid)
    if grad_log_prob is not None:
        has_grad |= grad_log_prob != 0
        at_target -= grad_log_prob * log_prob.expm1()  # 1 - p, accurate when p is near 1
    if grad_entropy is not None:
        assert of_entropy.mean_z is not None
        has_grad |= grad_entropy != 0
        z = ((saved["target_logit"] - of_entropy.max_logit) / temperature).clamp(min=exp_floor(source.dtype))
        at_target -= grad_entropy * (z.exp() / of_entropy.sum_exp) * (z - of_entropy.mean_z)

    # Rows that a loss mask leaves out may hold NaN, and zero times NaN is NaN.
    has_grad &= valid
    at_target = torch.where(has_grad, at_target / temperature, 0.0)

    def of_tile(tile: Tile, in_place: bool) -> Tensor:
        target = TargetGradient(_column_in_tile(local_target, tile)[:, None], at_target[tile.rows, None])
        mask = None if keep_mask is None else keep_mask[tile.rows, tile.columns]
        return softmax.gradient(
            tile.logits,
            None if unmasked is None else unmasked.of_rows(tile.rows),
            None if masked is None else masked.of_rows(tile.rows),
            target,
            mask,
            has_grad[tile.rows, None],
            replace(options, inplace_backward=in_place),
        )

    return source.gradients(of_tile, needed)


def _softmax(merged: Sequence[Tensor], dtype: torch.dtype) -> _Softmax:
    """Return what backward needs of the statistics ``[2 or 3, n]``."""
    max_logit, sum_exp_minus_1, *sum_z_exp = merged
    sum_exp = 1.0 + sum_exp_minus_1
    mean_z = (sum_z_exp[0] / sum_exp).to(dtype) if sum_z_exp else None
    return _Softmax(max_logit.to(dtype), sum_exp.to(dtype), mean_z)
