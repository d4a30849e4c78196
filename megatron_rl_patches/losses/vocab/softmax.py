"""Softmax statistics and gradients of a block of rows, with plain operators that may be compiled.

Compiled, :func:`block_statistics` and :func:`block_gradient` each read the logits in a single kernel. Where
nothing is compiled, :func:`buffered_statistics` takes the place of the first, and the operators write into
buffers that stay in the cache.

What a block of columns adds to a row, with ``z = (x - max_logit) / T``:

* ``max_logit``, -inf where no column counts,
* ``sum_exp_minus_1 = sum(exp(z)) - 1``,
* ``sum_z_exp = sum(z * exp(z))``, for the entropy.

Numerics: a sum over a row is made of float32 sums over stretches of 64 to 2,048 columns, or of the row where
its width has no such divisor, added up in float64. The largest term, ``exp(0) = 1``, is left out, since it
would swallow the digits of small others. Against float64, log-probabilities and entropies have a relative
error of 1e-7, and below 2e-6 in the worst cases of the tests; a gradient's single terms ``exp(z)`` have one
that grows with ``-z``, to 4e-6 for probabilities below 1e-20.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_MINUS_INF = float("-inf")
LOG2_E = 1.4426950408889634
_LONGEST_STRETCH = 4096  # that is summed in float32

#: What one softmax contributes to the gradient of rows ``x``: ``(max_logit, a, b)``, ``[n, 1]`` each, mean
#: ``exp(z) * (a + b * z)`` with ``z = (x - max_logit) / scale``. ``b`` is ``None`` where no entropy is
#: differentiated, and all three are where there is no softmax: torch.compile guards on the members of an
#: argument that it has seen before, and fails if the argument itself becomes ``None``.
SoftmaxGradient = tuple[Tensor | None, Tensor | None, Tensor | None]
NO_SOFTMAX: SoftmaxGradient = (None, None, None)
#: Of one softmax: the keep-mask ``[rows, stretches, columns]`` or ``None``, and whether there is an entropy.
_Pass = tuple[Tensor | None, bool]


class RowsOf(NamedTuple):
    """Rows of logits, or of their gradient, by their numbers: a compiled function needs no copy of them."""

    x: Tensor
    numbers: Tensor


def taken(x: Tensor | RowsOf) -> Tensor:
    """Return rows that may be given by their numbers."""
    return x.x[x.numbers] if isinstance(x, RowsOf) else x


def put(out: Tensor | RowsOf, values: Tensor) -> None:
    """Write values into rows that may be given by their numbers."""
    if isinstance(out, RowsOf):
        out.x.index_copy_(0, out.numbers, values.to(out.x.dtype))
    elif values is not out:
        out.copy_(values)


def block_statistics(
    x: Tensor | RowsOf, passes: Sequence[_Pass], scale: Tensor | None
) -> list[tuple[Tensor, ...]]:
    """Return the statistics of each pass over logits ``[rows, stretches, columns]``, which are read once."""
    x = taken(x)
    x = x if x.dtype == torch.float64 else x.float()
    return [_merged_stretches(x, one_pass, scale) for one_pass in passes]


def _merged_stretches(x: Tensor, one_pass: _Pass, scale: Tensor | None) -> tuple[Tensor, ...]:
    keep_mask, with_entropy = one_pass
    if keep_mask is not None:
        x = torch.where(keep_mask, x, _MINUS_INF)
    max_logits = x.amax(2)
    difference = x - finite(max_logits)[:, :, None]
    exp_z = exp(difference, scale=scale)
    # The stretch of the largest logit is read again, for a sum without 1, and with the digits of the others.
    max_logit, largest = max_logits.max(1)
    largest_stretch = x[torch.arange(len(x), device=x.device), largest] - finite(max_logit)[:, None]
    is_largest = largest_stretch == 0
    others = sum_of_columns(exp(largest_stretch, scale=scale).masked_fill(is_largest, 0.0))
    minus_1 = others.double() + (sum_of_columns(is_largest.to(x.dtype)).double() - 1.0)
    in_largest = torch.arange(x.shape[1], device=x.device) == largest[:, None]
    parts = [max_logits, torch.where(in_largest, minus_1[:, None], sum_of_columns(exp_z).double() - 1.0)]
    if with_entropy:
        floor = exp_floor(x.dtype) if scale is None else finite(exp_floor(x.dtype) * scale)
        parts.append(scaled_(sum_of_columns(_bounded(difference, exp_z, floor) * exp_z), scale))
    return _merged([values.T for values in parts], scale)


def buffered_statistics(x: Tensor, one_pass: _Pass, scale: Tensor | None, work: Tensor) -> tuple[Tensor, ...]:
    """Return the statistics of one pass over logits ``[rows, stretches, columns]``.

    ``work`` ``[1 or 2, rows, stretches, columns]`` are overwritten; ``x`` may be the first of them.
    """
    keep_mask, with_entropy = one_pass
    if keep_mask is not None:
        minus_inf = torch.full((), _MINUS_INF, dtype=x.dtype, device=x.device)
        x = torch.where(keep_mask, x, minus_inf, out=work[0])
    max_logit, largest = x.amax(2).max(1)
    reference = finite(max_logit)[:, None]
    largest_stretch = x[torch.arange(len(x), device=x.device), largest]
    column = (largest * x.shape[2])[:, None] + largest_stretch.argmax(1, keepdim=True)
    z = scaled_(torch.sub(x, reference[:, :, None], out=work[0]), scale)
    if with_entropy:
        z.clamp_(min=exp_floor(z.dtype))
    exp_z = exp(z, out=work[int(with_entropy)])
    sums_z_exp = [sum_of_columns(z.mul_(exp_z)).sum(1, dtype=torch.float64)] if with_entropy else []
    # In place of the largest term, 1, stands 0, NaN for NaN and +inf, and -1 where no column counts.
    exp_z.flatten(1).scatter_(1, column, (max_logit[:, None] - reference).clamp_(min=-1.0))
    return max_logit, sum_of_columns(exp_z).sum(1, dtype=torch.float64), *sums_z_exp


def finite(max_logit: Tensor) -> Tensor:
    """Replace -inf, the largest logit where no column counts."""
    return max_logit.clamp(min=torch.finfo(max_logit.dtype).min)


def merged(parts: Sequence[Tensor], scale: float) -> Tensor:
    """Return statistics ``[2 or 3, n]`` of all columns from those of parts, with equal bits on all ranks."""
    return torch.stack(_merged(torch.stack(list(parts)).unbind(1), scale))


def _merged(parts: Sequence[Tensor], scale: float | Tensor | None) -> tuple[Tensor, ...]:
    max_logits, sums, *sums_z_exp = parts
    max_logit = max_logits.amax(0)
    z = scaled_(max_logits - finite(max_logit), scale)
    weights = z.exp()
    # The weight of the largest part, 1, is left out: the result is the sum minus 1.
    is_largest = max_logits == max_logit
    others = weights.masked_fill(is_largest, 0.0).sum(0, dtype=torch.float64)
    sum_exp_minus_1 = (weights * sums).sum(0) + others + (is_largest.double().sum(0) - 1.0)
    statistics = max_logit.double(), torch.where(max_logit == _MINUS_INF, -1.0, sum_exp_minus_1)
    if not sums_z_exp:
        return statistics
    z = torch.where(weights == 0, 0.0, z)
    return *statistics, (weights * (sums_z_exp[0] + z * (1.0 + sums))).sum(0)


def block_gradient(
    x: Tensor | RowsOf,
    out: Tensor | RowsOf,
    unmasked: SoftmaxGradient,
    masked: SoftmaxGradient,
    keep_mask: Tensor | None,
    has_grad: Tensor | None,
    scale: Tensor | None,
    buffers: Tensor | None,
) -> None:
    """Write the gradient of logits ``x`` ``[rows, ...]`` into ``out``, which may be ``x`` itself.

    Args:
        buffers: ``[k, rows, ...]`` in the dtype of ``out``, to be overwritten: the first for a masked
            contribution beside an unmasked one, the last for ``z`` where there is a ``b``.
    """
    total, x = None, taken(x)
    buffer = None if buffers is None or isinstance(out, RowsOf) else out
    if keep_mask is not None:
        work = buffer if buffers is None or unmasked[1] is None else buffers[0]
        total = _contribution(x, masked, scale, work, work).masked_fill_(~keep_mask, 0.0)
    if unmasked[1] is not None:
        z_out = buffer if buffers is None or unmasked[2] is None else buffers[-1]
        part = _contribution(x, unmasked, scale, z_out, buffer)
        total = part if total is None else part.add_(total)
    if total is None:
        total = torch.zeros_like(x)
    if has_grad is not None:
        total.masked_fill_(~has_grad, 0.0)
    put(out, total)


def _contribution(
    x: Tensor, softmax: SoftmaxGradient, scale: Tensor | None, z_out: Tensor | None, exp_out: Tensor | None
) -> Tensor:
    """Return ``exp(z) * (a + b * z)``. Both buffers may be the same tensor if ``b`` is ``None``."""
    max_logit, a, b = softmax
    assert max_logit is not None and a is not None
    z = scaled_(torch.sub(x.to(max_logit.dtype), max_logit, out=z_out), scale)
    exp_z = exp(z, exp_out)
    if b is None:
        return exp_z.mul_(a)
    return torch.mul(_bounded(z, exp_z, exp_floor(z.dtype)).mul_(b).add_(a), exp_z, out=exp_out)


def _bounded(z: Tensor, exp_z: Tensor, floor: float | Tensor) -> Tensor:
    """Replace -inf, which is no number once it is multiplied by ``exp(-inf)``; ``z`` may be overwritten."""
    if z.is_cuda and torch.compiler.is_compiling():  # a choice takes fewer instructions on a GPU alone
        return torch.where(exp_z == 0, 0.0, z)
    return z.clamp_(min=floor)


def exp(z: Tensor, out: Tensor | None = None, *, scale: Tensor | None = None) -> Tensor:
    """Return ``exp(z / scale)`` by way of ``exp2``: on some CPUs ``torch.exp`` takes three times as long."""
    return torch.mul(z, LOG2_E if scale is None else LOG2_E / scale, out=out).exp2_()


def exp_floor(dtype: torch.dtype) -> float:
    """Return a ``z`` with ``exp(z) == 0`` to take the place of -inf, since ``0 * inf`` is not a number."""
    return -750.0 if dtype == torch.float64 else -110.0


def sum_of_columns(x: Tensor) -> Tensor:
    """Sum ``[..., columns]`` over its columns, long stretches in float64."""
    return x.sum(-1, dtype=torch.float64 if x.shape[-1] > _LONGEST_STRETCH else None)


def scaled_(z: Tensor, scale: float | Tensor | None) -> Tensor:
    """Divide differences ``z`` of logits in place. To divide the logits first would add a rounding error."""
    return z if scale is None else z.div_(scale)
