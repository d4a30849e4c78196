"""Log-probabilities and entropy of target tokens from logits that are split over the vocabulary.

For logits ``x`` of a row and a temperature ``T``::

    log_prob = log_softmax(x / T)[target]        d log_prob / dx = (onehot(target) - p) / T
    entropy  = -sum(p * log p)                   d entropy / dx  = -p * (log p + entropy) / T

Beyond the caller's logits nothing of their size is allocated but the gradient, and with ``inplace_backward``
not even that: forward keeps a few numbers per row (see :mod:`.softmax`), which tensor-parallel ranks exchange
once, and backward computes the softmax again, a block of rows at a time. Frameworks keep one to three
softmaxes and use three to six collectives (slime's ``_VocabParallelLogProbEntropy``, verl's
``vocab_parallel_entropy``, Megatron's ``vocab_parallel_cross_entropy``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .arguments import Rows, VocabParallelOptions
from .reduction import Block, Blocks, Loss, Read, Results, Writer
from .softmax import (
    NO_SOFTMAX,
    SoftmaxGradient,
    block_gradient,
    block_statistics,
    buffered_statistics,
    exp_floor,
    merged,
)
from .sources import Source, Tensors, Tile, check_mask, rows_of, valid_ids

_MINUS_INF = float("-inf")


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
        vocab_size: number of token ids; the columns from there on, on any ranks, pad the vocabulary: they are
            not read, and have probability and gradient zero. Default: ``V``.
        keep_mask: bool ``[n, V / tp]``, the columns that sampling chose from (top-p, top-k). The others have
            probability zero, except the target, which was sampled. The entropy does not see the mask.
        inplace_backward: write the gradient into the storage of the logits. They must fill it, as a reshaped
            view of a whole tensor does, and be no leaf that requires grad. Operations that saved the logits
            for their backward raise, and so do these functions if they get the logits after backward; any
            other read sees the gradient.
        block_bytes: size of the scratch memory for a block of rows. Default: on a CPU 2 MiB per thread but
            at most 1% of the logits, on a GPU 64 MiB or 1%, whichever is more.
        fused: ``True``: the functions of a block are compiled, and errors of the compiler are raised;
            ``False``: they run as plain operators; ``"auto"``: they are compiled for large logits where there
            is a compiler, and run as plain operators if it fails. Nothing is compiled while torch forbids it,
            or while a dispatch mode such as ``FlopCounterMode`` is on.
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
            after it, on a GPU that rank does, and the other ranks' kernels stop with a device-side assertion,
            as kernels do where *values* of ``targets`` or ``rows`` do not fit. In backward: the logits were
            overwritten since forward.
    """
    how = tp_group, temperature, inplace_backward, block_bytes, vocab_size, fused, ignore_index
    return log_probs_and_entropy(logits, targets, rows, keep_mask, VocabParallelOptions(*how))[0]


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
    """Return the log-probability of a target token ``[n]`` and the entropy ``[n]`` in nats, of selected rows.

    Both come from the same pass over the logits and the same collective. The arguments are those of
    :func:`vocab_parallel_log_probs`; a keep-mask costs a second pass. Without ``entropy_grad`` the entropy
    does not require grad (a metric, or a coefficient of zero), and backward costs what it does without.
    """
    how = tp_group, temperature, inplace_backward, block_bytes, vocab_size, fused, ignore_index
    options = VocabParallelOptions(*how, with_entropy=True, entropy_grad=entropy_grad)
    return log_probs_and_entropy(logits, targets, rows, keep_mask, options)


def log_probs_and_entropy(
    logits: Tensor, targets: Tensor, rows: Rows, keep_mask: Tensor | None, options: VocabParallelOptions
) -> tuple[Tensor, Any]:
    """Return log-probabilities and entropies, or ``None``, of selected rows; see the functions above."""
    source = rows_of(logits, rows, options)
    if keep_mask is not None:
        check_mask(keep_mask, source)
    ids = valid_ids("targets", targets, source)
    log_probs, entropies = LogProbsAndEntropy()(source, ids=ids, keep_mask=keep_mask)
    if entropies is not None and not options.entropy_grad:
        entropies = entropies.detach()
    return log_probs, entropies


# --- the loss


class LogProbsAndEntropy(Loss):
    """Log-probabilities and entropies of targets."""

    def forward(self, sources: Sequence[Source], tensors: Tensors, read: Read) -> Results:
        (source,), ids, keep_mask = sources, tensors["ids"], tensors["keep_mask"]
        options, scale = source.options, source.scale
        with_entropy = options.with_entropy
        passes = [(keep_mask, False)] if keep_mask is not None else []
        passes += [(None, with_entropy)] if with_entropy or not passes else []
        sizes = [2 + entropy for _, entropy in passes]
        # Where the logits of a block are copied, the first of two passes must not overwrite them.
        spare = int(len(passes) > 1 and source.copies_rows)
        only_log_probs = keep_mask is None and not (with_entropy and options.entropy_grad)
        derivative = source.forward_derivative() if only_log_probs else None

        def part(block: Block) -> Tensor:
            masked_passes = [(_mask_of_block(mask, block), entropy) for mask, entropy in passes]
            if block.work is None:
                values = block.function(block.xs[0], masked_passes, scale)
            else:
                work = block.work[spare:]
                values = [buffered_statistics(block.xs[0], one, scale, work) for one in masked_passes]
            return torch.stack([value.double() for one in values for value in one])

        def finish_tile(tile: Tile, statistics: Tensor) -> Tensor:
            column, is_here = _target_columns(ids[tile.rows], source, tile.columns)
            logit = torch.where(is_here, tile.at(column).double(), _MINUS_INF)
            if keep_mask is not None:
                is_kept = keep_mask[tile.rows, tile.columns].gather(1, column[:, None]).squeeze(1)
                # A target that the mask leaves out is one more column of the first pass.
                target = logit.masked_fill(is_kept, _MINUS_INF)
                with_target = [statistics[:2], torch.stack([target, torch.zeros_like(target)])]
                statistics = torch.cat([merged(with_target, options.scale), statistics[2:]])
            if derivative is not None:
                derivative.add(tile, statistics[0], column, is_here)
            values = torch.cat([statistics, logit[None]])
            if options.divisor != 1:
                for row in (0, *sizes[:-1], -1):  # the largest logit of each pass, and the target's
                    values[row] /= options.divisor
            return values

        def merge(parts: Sequence[Tensor]) -> Tensor:
            by_pass = zip(*(torch.split(values[:-1], sizes) for values in parts), strict=True)
            logit = torch.stack([values[-1] for values in parts]).amax(0)
            return torch.cat([*(merged(one, options.temperature) for one in by_pass), logit[None]])

        blocks = Blocks(1 + with_entropy + spare, takes_numbers=True)
        total = read(block_statistics, part, merge, blocks, finish_tile, keeps_tiles=derivative is None)
        return self._results(source, ids, keep_mask, torch.split(total, [*sizes, 1]), derivative)

    def _results(
        self, source: Source, ids: Tensor, keep_mask: Tensor | None, total: Sequence[Tensor], derivative: Any
    ) -> Results:
        """Return the results from the statistics of each pass and the targets' logits, ``[m, n]`` each."""
        options, is_ignored = source.options, ids == source.options.ignore_index
        *statistics, (target_logit,) = total
        # Of the columns that log-probabilities see, and of all columns; without a mask these are the same.
        masked, unmasked = _Softmax(statistics[0], options), _Softmax(statistics[-1], options)
        exact, entropy = masked.log_prob(target_logit), None
        log_prob = exact.masked_fill(is_ignored, 0.0).to(source.dtype)
        if options.with_entropy:
            exact_entropy = unmasked.entropy()
            entropy = exact_entropy.masked_fill(is_ignored, 0.0).to(source.dtype)
        if derivative is not None:
            target = _target_columns(ids, source, slice(0, source.width))
            derivative_nh = derivative.finish(*target, *masked.for_backward(), -exact.expm1() / options.scale)
            return (log_prob, entropy), {"ids": ids, "derivative": derivative_nh}
        # Of the target, whose gradient is more than that of a column, by log-probability and by entropy.
        values = [*masked.for_backward(), exact.expm1()]  # 1 - p, accurate when p is near 1
        if options.with_entropy and options.entropy_grad:
            log_p = exact if keep_mask is None else unmasked.log_prob(target_logit)
            log_p = log_p.clamp(min=exp_floor(torch.float64))
            values += [log_p.exp() * (log_p + exact_entropy), *unmasked.mean_z]
            values += [] if keep_mask is None else unmasked.for_backward()
        numbers = torch.stack(values).to(source.dtype)
        return (log_prob, entropy), {"ids": ids, "keep_mask": keep_mask, "numbers": numbers}

    def writer(self, sources: Sequence[Source], saved: Tensors, *gradients: Tensor | None) -> Writer | Tensor:
        """Return what writes ``exp(z) * (a + b * z)``, summed over the softmaxes, and the target's gradient.

        With ``g`` and ``h`` the gradients of log-probability and entropy, a column gets
        ``-p * (g + h * (z - mean of z)) / T``, where the mean of ``z`` is that of ``p``, and the target
        ``((1 - p) * g - p * h * (log p + entropy)) / T``; ``T`` is the scale. A keep-mask has its own ``p``.
        """
        (source,), (g, h) = sources, gradients
        valid = saved["ids"] != source.options.ignore_index
        if "derivative" in saved:
            assert g is not None
            has_grad = valid & (g != 0)  # other rows may hold NaN
            return torch.where(has_grad[:, None], g[:, None] * saved["derivative"], 0.0)
        ids, keep_mask, numbers = saved.values()
        scale = source.options.scale
        max_logit, weight, by_log_prob, *entropy_numbers = numbers.unbind()
        of_log_prob = of_entropy = NO_SOFTMAX
        if g is not None:
            has_grad, at_target = g != 0, g * by_log_prob
            of_log_prob = _columns(max_logit, weight * g)
        if h is not None:
            by_entropy, mean_z, *others = entropy_numbers
            max_logit, weight = others or (max_logit, weight)
            column_factor = -h * mean_z if g is None or keep_mask is not None else g - h * mean_z
            of_entropy = _columns(max_logit, weight * column_factor, weight * h)
            has_grad = h != 0 if g is None else torch.logical_or(g, h)
            at_target = h * by_entropy if g is None else at_target + h * by_entropy
        masked, unmasked = of_log_prob, of_entropy
        if keep_mask is None:  # both are of one softmax
            masked, unmasked = NO_SOFTMAX, of_log_prob if h is None else of_entropy
        # Rows that a loss mask leaves out may hold NaN, and zero times NaN is NaN.
        has_grad = has_grad & valid
        at_target = at_target / -scale
        # On a GPU, reading the answer would make the CPU wait, and masking rows costs nothing.
        if not (all_have_grad := has_grad.device.type == "cpu" and bool(has_grad.all())):
            at_target = torch.where(has_grad, at_target, 0.0)

        def write(block: Block) -> None:
            block.function(
                block.xs[0],
                block.out,
                tuple(map(block.part, unmasked)),
                tuple(map(block.part, masked)),
                None if masked[1] is None else _mask_of_block(keep_mask, block),
                None if all_have_grad else block.part(has_grad[:, None]),
                source.scale,
                block.work,
            )

        def finish(tile: Tile, gradient: Tensor) -> None:
            column, is_here = _target_columns(ids[tile.rows], source, tile.columns)
            tile.put(gradient, column, is_here, at_target[tile.rows].to(gradient.dtype))

        tensors = (masked[1] is not None and unmasked[1] is not None) + (unmasked[2] is not None)
        return Writer(block_gradient, write, Blocks(tensors, takes_numbers=True), finish)


class _Softmax:
    """A softmax of each row, float64, in the caller's units; ``for_backward`` is of the logits read."""

    def __init__(self, statistics: Tensor, options: VocabParallelOptions) -> None:
        self.max_logit, sum_exp_minus_1, *sum_z_exp = statistics.unbind()
        self.sum_exp, self._options = 1.0 + sum_exp_minus_1, options
        self._log_sum_exp = sum_exp_minus_1.log1p()
        self.mean_z = [total / self.sum_exp for total in sum_z_exp]  # one, where there is an entropy

    def log_prob(self, logit: Tensor) -> Tensor:
        return (logit - self.max_logit) / self._options.temperature - self._log_sum_exp

    def entropy(self) -> Tensor:
        return self._log_sum_exp - self.mean_z[0]

    def for_backward(self) -> list[Tensor]:
        """Return the largest logit as this rank reads it, and what ``exp(z)`` is to be multiplied by."""
        return [self.max_logit * self._options.divisor, (-1.0 / self._options.scale) / self.sum_exp]


def _target_columns(ids: Tensor, source: Source, columns: slice) -> tuple[Tensor, Tensor]:
    """Return a place in a range of columns for each row, and whether it is that of the row's target."""
    column, is_here = source.columns_of_ids(ids, columns)
    return column.clamp(0, columns.stop - columns.start - 1), is_here


def _mask_of_block(mask: Tensor | None, block: Block) -> Tensor | None:
    return None if mask is None else block.cut(mask[block.rows, block.tile.columns])


def _columns(max_logit: Tensor, a: Tensor, b: Tensor | None = None) -> SoftmaxGradient:
    return max_logit[:, None], a[:, None], None if b is None else b[:, None]
