"""Log-probabilities and entropy of target tokens from logits that are split over the vocabulary.

For logits ``x`` of a row and a temperature ``T``::

    log_prob = log_softmax(x / T)[target]        d log_prob / dx = (onehot(target) - p) / T
    entropy  = -sum(p * log p)                   d entropy / dx  = -p * (log p + entropy) / T

Beyond the caller's logits nothing of their size is allocated but the gradient, and with ``inplace_backward``
not even that: forward keeps a few numbers per row, backward computes the softmax again, a block of rows at a
time. Tensor parallel ranks exchange these few numbers once in forward and nothing in backward.

Frameworks keep one to three softmaxes and use three to six collectives: slime's
``_VocabParallelLogProbEntropy``, verl's ``vocab_parallel_entropy``, Megatron's
``vocab_parallel_cross_entropy`` (which overwrites its input).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import softmax
from .arguments import VocabParallelOptions, check_mask, valid_targets
from .autograd import LogitFunction, Tensors, all_gather_statistics
from .rows import Inputs, LogitSource, Tile, rows_of
from .slices import Rows
from .softmax import NO_SOFTMAX, RowGradients, SoftmaxGradient, exp_floor


def vocab_parallel_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    rows: Rows = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    keep_mask: Tensor | None = None,
    inplace_backward: bool = False,
    block_bytes: int | None = None,
    fused: bool | str = "auto",
    ignore_index: int = -100,
) -> Tensor:
    """Return the log-probability of a target token in each selected row.

    Args:
        logits: ``[T, V / tp]`` in float32, bfloat16, float16 or float64: on rank ``r`` of the group the
            columns from ``r * V / tp`` on of the whole vocabulary. Forward does not change them.
        targets: token ids ``[n]`` in the whole vocabulary, of the selected rows.
        tp_group: ranks that hold the other columns; ``None``: there are none. All ranks call with the same
            arguments but for their columns, also when there are no rows.
        rows: which ``n`` of the ``T`` rows: a slice, several of them in order, or row numbers (int64), each
            at most once; ``None``: all of them. The others are not read, and their gradient is zero. Slices
            take less time than numbers, but for long runs of numbers on the CPU.
        temperature: logits are divided by it, as they were when the tokens were sampled.
        vocab_size: number of token ids, where the columns from there on, on any ranks, pad the vocabulary:
            they have probability zero and a gradient of zero, and are not read. Default: ``V``.
        keep_mask: bool ``[n, V / tp]``, the columns that sampling chose from (top-p, top-k). The others have
            probability zero, except the target, which was sampled. The entropy does not see the mask.
        inplace_backward: write the gradient into the storage of the logits. They must fill that storage: a
            reshaped view of a whole tensor does, a part of one does not, and neither may it be a leaf that
            requires grad. Other operations that saved the logits for their backward raise, and so do these
            functions if they are given the logits after backward; any other read sees the gradient.
        block_bytes: size of the scratch memory for a block of rows. Default: on a CPU 2 MiB per thread but
            at most 1% of the logits, on a GPU 64 MiB or 1%, whichever is more.
        fused: ``True``: the functions that work on a block are compiled, and what the compiler raises is
            raised; ``False``: they run as plain operators; ``"auto"``: they are compiled for large logits
            where there is a compiler, and run as plain operators if it fails. Nothing is compiled while torch
            forbids it, or while a dispatch mode such as ``FlopCounterMode`` is on.
        ignore_index: a row with this target has log-probability and entropy 0 and no gradient.

    Returns:
        ``[n]`` in float32 (float64 for float64 logits), bitwise equal on all ranks of ``tp_group``. The
        gradient has the dtype of the logits, and cannot be differentiated again.

        NaN and +inf make NaN of the values and the gradient of their own row, and of no other. A row whose
        values get a gradient of zero, as one that a loss mask leaves out, has a gradient of zero whatever
        its logits are.

    Raises:
        InvalidInputError: arguments do not fit; raised on every rank alike and before the one collective
            (an all-gather of a few numbers per row over ``tp_group``). Each rank decides whether its own
            logits can be overwritten, and its refusal travels with the collective: on a CPU all ranks raise
            after it, on a GPU that rank does, and the other ranks' kernels stop with a device-side assertion.
            So do kernels on a GPU where *values* of ``targets`` or ``rows`` do not fit. In backward: the
            logits were overwritten since forward.
    """
    options = VocabParallelOptions(
        tp_group, temperature, inplace_backward, block_bytes, fused, ignore_index, vocab_size=vocab_size
    )
    return log_probs_and_entropy(logits, targets, rows, keep_mask, options)[0]


def vocab_parallel_log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    rows: Rows = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    keep_mask: Tensor | None = None,
    inplace_backward: bool = False,
    block_bytes: int | None = None,
    fused: bool | str = "auto",
    ignore_index: int = -100,
    entropy_grad: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of a target token, and the entropy in nats, of each selected row.

    Both come from the same pass over the logits and the same collective. The arguments are those of
    :func:`vocab_parallel_log_probs`; a keep-mask costs a second pass.

    Args:
        entropy_grad: ``False``: the entropy does not require grad (a metric, or a coefficient of zero), and
            backward costs what it does without.

    Returns:
        Log-probabilities ``[n]`` and entropies ``[n]``.
    """
    how = tp_group, temperature, inplace_backward, block_bytes, fused, ignore_index, True, entropy_grad
    options = VocabParallelOptions(*how, vocab_size=vocab_size)
    log_probs, entropies = log_probs_and_entropy(logits, targets, rows, keep_mask, options)
    assert entropies is not None
    return log_probs, entropies


def log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    rows: Rows,
    keep_mask: Tensor | None,
    options: VocabParallelOptions,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities and entropies, or ``None``, of selected rows; see the functions above."""
    source = rows_of(logits, rows, options)
    if keep_mask is not None:
        check_mask(keep_mask, source)
    scored = _Targets.from_ids(valid_targets(targets, source), keep_mask, source)
    log_probs, entropies = _LogProbsAndEntropy(source.claim()).apply(source, **scored._asdict())
    if entropies is not None and not options.entropy_grad:
        entropies = entropies.detach()
    return log_probs, entropies


# --- the autograd function


class _Targets(NamedTuple):
    """The token that is scored in each row, and the columns that log-probabilities see beside it."""

    column: Tensor  # [n], of this rank, or -1
    valid: Tensor  # bool [n], whether there is a target
    keep_mask: Tensor | None = None  # bool [n, V / tp]

    @classmethod
    def from_ids(cls, ids: Tensor, keep_mask: Tensor | None, source: LogitSource) -> _Targets:
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


class _LogProbsAndEntropy(LogitFunction):
    """Log-probabilities and entropies of targets; backward gets the inputs and a few numbers per row."""

    def forward(self, source: LogitSource, tensors: Tensors) -> tuple[tuple[Tensor, Tensor | None], Tensors]:
        targets, options = _Targets(**tensors), source.options
        has_gradient_of_entropy = options.with_entropy and options.entropy_grad
        derivative = None
        if targets.keep_mask is None and not has_gradient_of_entropy:
            derivative = source.forward_derivative()
        source = source if derivative is None else source.without_keeping()
        log_prob, entropy, saved = self._scores(source, targets, derivative)
        return (log_prob, entropy), {"keep_mask": targets.keep_mask, **saved}

    def _scores(
        self, source: LogitSource, targets: _Targets, derivative: Any
    ) -> tuple[Tensor, Tensor | None, Tensors]:
        """Read all tiles once; one collective.

        Returns:
            Log-probabilities ``[n]``, entropies ``[n]`` or ``None``, and what :meth:`gradients` needs
            of each row, ``[..., n]`` each.
        """
        options, valid, has_mask = source.options, targets.valid, targets.keep_mask is not None

        def merge(parts: Sequence[Tensor], scale: float = options.scale) -> Tensor:
            """Return the statistics ``[m, n]`` of all columns from those of tiles or ranks."""
            stacked = torch.stack(list(parts)).double()
            merged = [softmax.merge(x, scale) for x in _softmaxes(stacked[:, :-1], has_mask)]
            return torch.cat([*merged, stacked[:, -1].amax(0)[None]])

        def of_tile(tile: Tile) -> Tensor:
            """Return :func:`.softmax.statistics` and the targets' logits, -inf where the tile has none."""
            column, mask = targets.in_tile(tile)
            statistics = softmax.statistics(tile.logits, column, mask)
            logit = torch.where(column < 0, float("-inf"), tile.logits.at(column))
            values = torch.cat([*statistics, logit[None]])
            if derivative is not None:
                derivative.add(tile, statistics[-1][0], column)
            return values

        local = source.reduce(of_tile, merge).to(source.dtype)
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

    def gradients(
        self, source: LogitSource, saved: Tensors, needed: Sequence[bool], *gradients: Tensor | None
    ) -> Inputs:
        valid, (grad_log_prob, grad_entropy) = saved["valid"], gradients
        if "derivative" in saved:
            assert grad_log_prob is not None
            # A row without a gradient may hold NaN.
            has_grad = (valid & (grad_log_prob != 0))[:, None]
            of_rows = torch.where(has_grad, grad_log_prob[:, None] * saved["derivative"], 0.0)
            return source.gradients_by_derivative(of_rows)
        temperature = source.options.scale
        targets = _Targets(saved["column"], valid, saved.get("keep_mask"))
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

        of_all = RowGradients(unmasked, masked, at_target, has_grad)

        def of_tile(tile: Tile, gradient: Tensor) -> None:
            column, mask = targets.in_tile(tile)
            softmax.write_gradient(tile.logits, gradient, of_all.part(tile.rows), column, mask)

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
