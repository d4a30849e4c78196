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

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import softmax
from .autograd import gradients_of_inputs, save_source
from .checks import checked_source, valid_targets
from .frozen_head import Derivatives, WholeSoftmax
from .head import HeadLogits
from .inplace import StorageClaim
from .options import VocabParallelOptions
from .softmax import SoftmaxGradient, TargetGradient, exp_floor
from .source import Inputs, LogitSource, Tile


def vocab_parallel_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    rows: Tensor | slice | None = None,
    temperature: float = 1.0,
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
        rows: which ``n`` of the ``T`` rows: a slice, or row numbers (int64), each at most once; ``None``: all
            of them. The others are not read, and their gradient is zero.
        temperature: logits are divided by it, as they were when the tokens were sampled.
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
            where there is a compiler, and run as plain operators if it fails.
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
        tp_group=tp_group,
        temperature=temperature,
        inplace_backward=inplace_backward,
        block_bytes=block_bytes,
        fused=fused,
        ignore_index=ignore_index,
    )
    return _log_probs_and_entropy(logits, targets, rows, keep_mask, options)[0]


def vocab_parallel_log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    rows: Tensor | slice | None = None,
    temperature: float = 1.0,
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
    options = VocabParallelOptions(
        tp_group=tp_group,
        temperature=temperature,
        inplace_backward=inplace_backward,
        block_bytes=block_bytes,
        fused=fused,
        ignore_index=ignore_index,
        with_entropy=True,
        entropy_grad=entropy_grad,
    )
    log_probs, entropies = _log_probs_and_entropy(logits, targets, rows, keep_mask, options)
    assert entropies is not None
    return log_probs, entropies


def _log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    rows: Tensor | slice | None,
    keep_mask: Tensor | None,
    options: VocabParallelOptions,
) -> tuple[Tensor, Tensor | None]:
    source, options = checked_source(logits, rows, keep_mask, options)
    targets = valid_targets(targets, source, options)
    valid = targets != options.ignore_index
    start = options.tp_rank * source.width
    is_local = valid & (targets >= start) & (targets < start + source.width)
    local_target = torch.where(is_local, targets - start, -1)
    return LogProbsAndEntropy.apply(  # type: ignore[no-untyped-call]
        source, local_target, valid, keep_mask, options, source.claim(), *source.inputs
    )


class _Softmax(NamedTuple):
    """A softmax of each row over the whole vocabulary, ``[n]`` each, with ``z = (x - max_logit) / T``."""

    max_logit: Tensor
    sum_exp: Tensor  # sum(exp(z))
    mean_z: Tensor | None  # sum(p * z), for the entropy

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


class LogProbsAndEntropy(torch.autograd.Function):
    """The autograd function of log-probabilities and entropies; it keeps the inputs and numbers per row."""

    @staticmethod
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
        """``local_target`` ``[n]`` is a column of this rank or -1, ``valid`` ``[n]`` is bool."""
        ctx.set_materialize_grads(False)
        derivatives = Derivatives.of(source, keep_mask, options)
        if derivatives is not None and isinstance(source, HeadLogits):
            source = replace(source, keeps_tiles=False)  # backward reads no tiles
        local, target_logit = _local_statistics(source, local_target, keep_mask, options, derivatives)
        sizes = [*map(len, local), 1]
        sent = torch.cat([*local, target_logit[None]]).to(source.dtype)
        gathered = claim.gather(sent, options.tp_group)
        *parts, target_logits = torch.split(gathered.double(), sizes, dim=1)
        merged = [softmax.merge(part, options.temperature) for part in parts]
        target_logit = target_logits.amax((0, 1))

        max_logit, sum_exp_minus_1, *_ = merged[0]
        exact_log_prob = (target_logit - max_logit) / options.temperature - sum_exp_minus_1.log1p()
        log_prob = torch.where(valid, exact_log_prob, 0.0).to(source.dtype)
        softmaxes = [_softmax(one, source.dtype) for one in merged]
        entropy = mean_z = None
        if options.with_entropy:
            mean_z = merged[-1][2] / (1.0 + merged[-1][1])
            entropy = merged[-1][1].log1p() - mean_z
            entropy = torch.where(valid, entropy, 0.0).to(source.dtype)
            if not options.entropy_grad:
                ctx.mark_non_differentiable(entropy)
                softmaxes = softmaxes[:1]

        ctx.options, ctx.claim, ctx.has_derivatives = options, claim, derivatives is not None
        if derivatives is not None:
            whole = WholeSoftmax(max_logit, 1.0 + sum_exp_minus_1, mean_z, exact_log_prob, target_logit)
            save_source(ctx, source, valid, *derivatives.finish(local_target, whole))
            return log_prob, entropy
        saved = [value for one in softmaxes for value in one]
        target_logit = target_logit.to(source.dtype)
        # The caller may change the returned tensor, so a copy is saved.
        save_source(ctx, source, keep_mask, local_target, valid, target_logit, log_prob.clone(), *saved)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        compute = _from_derivatives if ctx.has_derivatives else _gradients
        gradients = gradients_of_inputs(ctx, compute, grad_log_prob, grad_entropy)
        return (None,) * 6 + gradients


def _local_statistics(
    source: LogitSource,
    local_target: Tensor,
    keep_mask: Tensor | None,
    options: VocabParallelOptions,
    derivatives: Derivatives | None,
) -> tuple[list[Tensor], Tensor]:
    """Return :func:`.softmax.statistics` of all tiles together, and the targets' logits, float64 ``[n]``.

    The logit of a target that another rank has is -inf.
    """
    by_first_row: dict[int, list[list[Tensor]]] = {}  # tiles with the same rows belong together
    target_logit = torch.full((source.n,), float("-inf"), dtype=torch.float64, device=source.device)
    for tile in source.tiles():
        column = _column_in_tile(local_target, tile)
        mask = None if keep_mask is None else keep_mask[tile.rows, tile.columns]
        statistics = softmax.statistics(tile.logits, column, mask, options)
        by_first_row.setdefault(tile.rows.start, []).append(statistics)
        selected = tile.logits
        logit = selected.logits[selected.row_indices, column.clamp(min=0)].double()
        target_logit[tile.rows] = torch.where(column < 0, target_logit[tile.rows], logit)
        if derivatives is not None:
            derivatives.add(tile, statistics[-1][0], column)
    of_rows = [
        [_merged(parts, options.temperature) for parts in zip(*of_tiles, strict=True)]
        for of_tiles in by_first_row.values()
    ]
    return [torch.cat(parts, dim=1) for parts in zip(*of_rows, strict=True)], target_logit


def _merged(parts: tuple[Tensor, ...], temperature: float) -> Tensor:
    return parts[0] if len(parts) == 1 else softmax.merge(torch.stack(parts), temperature)


def _column_in_tile(local_target: Tensor, tile: Tile) -> Tensor:
    """Return the targets of the tile's rows as columns of the tile; -1 where it does not have them."""
    columns = local_target[tile.rows]
    inside = (columns >= tile.columns.start) & (columns < tile.columns.stop)
    return torch.where(inside, columns - tile.columns.start, -1)


def _from_derivatives(
    ctx: Any,
    source: LogitSource,
    saved: list[Any],
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
) -> Inputs:
    valid, *derivatives = saved
    assert isinstance(source, HeadLogits)
    total = torch.zeros_like(derivatives[0])
    for gradient, derivative in zip((grad_log_prob, grad_entropy), derivatives, strict=True):
        if gradient is not None:
            # A row without a gradient may hold NaN.
            has_grad = (valid & (gradient != 0))[:, None]
            total += torch.where(has_grad, gradient[:, None] * derivative, 0.0)
    return source.spread(total), None, None


def _gradients(
    ctx: Any,
    source: LogitSource,
    saved: list[Any],
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
) -> Inputs:
    keep_mask, local_target, valid, target_logit, log_prob, *values = saved
    options: VocabParallelOptions = ctx.options
    temperature = options.temperature
    of_log_prob, of_entropy = _Softmax(*values[:3]), _Softmax(*values[-3:])

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
        z = ((target_logit - of_entropy.max_logit) / temperature).clamp(min=exp_floor(source.dtype))
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

    return source.gradients(of_tile, ctx.needs_input_grad[6:])


def _softmax(merged: Tensor, dtype: torch.dtype) -> _Softmax:
    """Return what backward needs of the statistics ``[2 or 3, n]``."""
    max_logit, sum_exp_minus_1, *sum_z_exp = merged
    sum_exp = 1.0 + sum_exp_minus_1
    mean_z = (sum_z_exp[0] / sum_exp).to(dtype) if sum_z_exp else None
    return _Softmax(max_logit.to(dtype), sum_exp.to(dtype), mean_z)
