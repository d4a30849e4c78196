"""Softmax statistics and gradients of a block of rows, with plain operators that may be compiled.

:func:`block_statistics` and :func:`block_gradient` work on one block of rows. Compiled, each reads the logits
in a single kernel. Where nothing is compiled, :func:`buffered_statistics` takes the place of the first, and
the operators write into buffers that stay in the cache. :func:`statistics` and :func:`gradient` go over all
rows and know where they are read and written.

Numerics: a sum over a row is made of float32 sums over stretches of some hundred columns, which are added
up in float64. The row's largest term, ``exp(0) = 1``, is left out of its stretch, since it would swallow the
digits of all others where these are small. Measured against float64, log-probabilities and entropies have a
relative error of 1e-7 in ordinary cases, and below 2e-6 in the worst cases of the tests. A gradient holds
single terms ``exp(z)``, whose relative error grows with ``-z``, to 4e-6 for probabilities below 1e-20.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .compiling import BlockFunction
from .rows import SelectedRows

_MINUS_INF = float("-inf")
_STRETCH = 256  # columns, or so
_SHORTEST_STRETCH = 64
_LONGEST_STRETCH = 4096  # that is summed in float32
_COMPILED_BLOCKS = 8  # times the size of other blocks
_LOG2_E = math.log2(math.e)


#: What one softmax contributes to the gradient of rows ``x``: ``(max_logit, a, b)``, ``[n, 1]`` each, mean
#: ``exp(z) * (a + b * z)`` with ``z = (x - max_logit) / temperature``. ``b`` is ``None`` where no entropy is
#: differentiated, and all three are where there is no softmax: torch.compile guards on the members of an
#: argument that it has seen before, and fails if the argument itself becomes ``None``.
SoftmaxGradient = tuple[Tensor | None, Tensor | None, Tensor | None]
NO_SOFTMAX: SoftmaxGradient = (None, None, None)
#: Of one softmax: the keep-mask ``[rows, stretches, columns]`` or ``None``, and whether there is an entropy.
_Pass = tuple[Tensor | None, bool]


class RowGradients(NamedTuple):
    """What the gradient of rows is computed from.

    Attributes:
        unmasked: contribution of the softmax over all columns.
        masked: contribution of the softmax over the columns in a keep-mask.
        at_target: the gradient at the targets, which is not the sum of the contributions; ``[n]``.
        has_grad: bool ``[n]``; a row where it is false has no gradient, whatever its logits are.
    """

    unmasked: SoftmaxGradient
    masked: SoftmaxGradient
    at_target: Tensor
    has_grad: Tensor

    def part(self, rows: slice) -> RowGradients:
        unmasked, masked = (_of_rows(softmax, rows) for softmax in (self.unmasked, self.masked))
        return RowGradients(unmasked, masked, self.at_target[rows], self.has_grad[rows])


def _of_rows(softmax: SoftmaxGradient, rows: slice) -> SoftmaxGradient:
    max_logit, a, b = (None if values is None else values[rows] for values in softmax)
    return max_logit, a, b


def statistics(rows: SelectedRows, local_target: Tensor, keep_mask: Tensor | None) -> list[Tensor]:
    """Read the rows once and return the statistics of one or two softmaxes over this rank's columns.

    Args:
        local_target: the target among this rank's columns, ``[n]``; -1 where another rank has it.
        keep_mask: bool ``[n, V / tp]``, the columns that log-probabilities see beside the target.

    Returns:
        Float64 ``[2, n]`` for the log-probabilities, or ``[3, n]`` if the same softmax serves the entropy.
        With a keep-mask and an entropy, ``[2, n]`` of the kept columns and ``[3, n]`` of all. With
        ``z = (x - max_logit) / temperature`` these are

        * ``max_logit``, -inf where no column counts,
        * ``sum_exp_minus_1 = sum(exp(z)) - 1`` (of a single part: 0 or -1 where no column counts),
        * ``sum_z_exp = sum(z * exp(z))``, for the entropy.
    """
    options = rows.options
    passes: list[_Pass] = []
    if keep_mask is not None:
        passes.append((stretches(keep_mask), False))
    if options.with_entropy or keep_mask is None:
        passes.append((None, options.with_entropy))
    results = [
        rows.logits.new_empty((2 + with_entropy, rows.n), dtype=torch.float64) for _, with_entropy in passes
    ]
    source = replace(rows, logits=stretches(rows.logits.detach()))
    temperature = rows.temperature()
    call = BlockFunction(block_statistics, rows)
    buffers = 1 + options.with_entropy
    for block, work in _blocks(call, rows, buffers):
        of_block = [(mask if mask is None else mask[block], with_entropy) for mask, with_entropy in passes]
        with call.attempt():
            if work is None:
                values = call(source.read(block, None), of_block, temperature)
            else:
                work = stretches(work)
                values = [
                    buffered_statistics(source.read(block, work[0]), one_pass, temperature, work)
                    for one_pass in of_block
                ]
            for result, of_pass in zip(results, values, strict=True):
                for total, value in zip(result, of_pass, strict=True):
                    total[block] = value
    if keep_mask is not None:
        results[0] = _with_target(results[0], rows, local_target, keep_mask)
    return results


def _blocks(call: BlockFunction, rows: SelectedRows, buffers: int) -> Iterator[tuple[slice, Tensor | None]]:
    """Yield blocks of the rows, with buffers ``[buffers, rows, V / tp]`` for plain operators.

    A compiled function needs none. Consecutive rows are read without a copy, so no buffer has to fit into the
    cache, and larger blocks mean fewer calls.
    """
    compiled = rows.blocks(1, scale=1 if isinstance(rows.index, Tensor) else _COMPILED_BLOCKS)
    plain = rows.blocks(buffers)
    scratch: Tensor | None = None
    for block in call.blocks(compiled, plain):
        if not call.compiled and scratch is None:
            scratch = rows.scratch(plain, buffers)
        yield block, None if scratch is None else scratch[:, : block.stop - block.start]


def block_statistics(
    x: Tensor, passes: Sequence[_Pass], temperature: Tensor | None
) -> list[tuple[Tensor, ...]]:
    """Return the statistics of each pass over logits ``[rows, stretches, columns]``, see :func:`statistics`.

    Compiled, these are two kernels: one reads the logits, once for all passes, for the statistics of each
    stretch. The other one merges those.
    """
    x = x if x.dtype == torch.float64 else x.float()
    return [_merged_stretches(x, one_pass, temperature) for one_pass in passes]


def _merged_stretches(x: Tensor, one_pass: _Pass, temperature: Tensor | None) -> tuple[Tensor, ...]:
    keep_mask, with_entropy = one_pass
    if keep_mask is not None:
        x = torch.where(keep_mask, x, _MINUS_INF)
    max_logit = x.amax(2)
    z = x - finite(max_logit)[:, :, None]
    is_largest = z == 0
    z = scaled_(z, temperature)
    if with_entropy:
        z = z.clamp_(min=exp_floor(z.dtype))
    exp_z = exp(z)
    # The largest terms are counted, not summed: 1 would swallow the digits of the others.
    of_others = sum_of_columns(exp_z.masked_fill(is_largest, 0.0)).double()
    parts = [max_logit, of_others + (sum_of_columns(is_largest.to(z.dtype)).double() - 1.0)]
    if with_entropy:
        parts.append(sum_of_columns(z * exp_z))
    return _merged([values.T for values in parts], temperature)


def buffered_statistics(
    x: Tensor, one_pass: _Pass, temperature: Tensor | None, buffers: Tensor
) -> tuple[Tensor, ...]:
    """Return the statistics of one pass over logits ``[rows, stretches, columns]``, see :func:`statistics`.

    ``buffers`` ``[1 or 2, rows, stretches, columns]`` are overwritten; ``x`` may be the first of them.
    """
    keep_mask, with_entropy = one_pass
    if keep_mask is not None:
        minus_inf = torch.full((), _MINUS_INF, dtype=x.dtype, device=x.device)
        x = torch.where(keep_mask, x, minus_inf, out=buffers[0])
    max_logit, largest = x.amax(2).max(1)
    reference = finite(max_logit)[:, None, None]
    # The stretch of the largest logit is summed without it: 1 would swallow the digits of the others.
    of_largest = x[torch.arange(len(x), device=x.device), largest] - reference[:, :, 0]
    of_largest = exp(scaled_(of_largest, temperature))
    of_largest = of_largest.scatter_(1, of_largest.argmax(1, keepdim=True), 0.0)
    z = scaled_(torch.sub(x, reference, out=buffers[0]), temperature)
    if with_entropy:
        z.clamp_(min=exp_floor(z.dtype))
    exp_z = exp(z, out=buffers[int(with_entropy)])
    sums = sum_of_columns(exp_z).scatter_(1, largest[:, None], sum_of_columns(of_largest)[:, None])
    sum_exp_minus_1 = sums.sum(1, dtype=torch.float64)
    if not with_entropy:
        return max_logit, sum_exp_minus_1
    return max_logit, sum_exp_minus_1, sum_of_columns(z.mul_(exp_z)).sum(1, dtype=torch.float64)


def finite(max_logit: Tensor) -> Tensor:
    """Replace -inf, the largest logit where no column counts."""
    return max_logit.clamp(min=torch.finfo(max_logit.dtype).min)


def merge(parts: Tensor, temperature: float) -> Tensor:
    """Return the statistics ``[2 or 3, n]`` over all columns from those of parts, ``[parts, 2 or 3, n]``.

    In float64 and in the order of the parts, so that ranks that have the same parts get the same bits.
    """
    return torch.stack(_merged(parts.unbind(1), temperature))


def _merged(parts: Sequence[Tensor], temperature: float | Tensor | None) -> tuple[Tensor, ...]:
    max_logits, sums, *sums_z_exp = (values.double() for values in parts)
    max_logit = max_logits.amax(0)
    z = scaled_(max_logits - finite(max_logit), temperature)
    weights = z.exp()
    # The weight of the largest part, 1, is left out: the result is the sum minus 1.
    is_largest = max_logits == max_logit
    of_largest = is_largest.double().sum(0) - 1.0
    sum_exp_minus_1 = (weights * sums).sum(0) + weights.masked_fill(is_largest, 0.0).sum(0) + of_largest
    sum_exp_minus_1 = torch.where(max_logit == _MINUS_INF, -1.0, sum_exp_minus_1)
    if not sums_z_exp:
        return max_logit, sum_exp_minus_1
    z = z.clamp(min=exp_floor(z.dtype))
    return max_logit, sum_exp_minus_1, (weights * (sums_z_exp[0] + z * (1.0 + sums))).sum(0)


def gradient(
    rows: SelectedRows,
    of_rows: RowGradients,
    local_target: Tensor,
    keep_mask: Tensor | None,
    in_place: bool,
) -> Tensor:
    """Return the gradient of all logits ``[T, V / tp]``, zero in the rows that were not selected.

    Args:
        local_target: ``[n]``, a column of this rank; -1 where another rank has the target.
    """
    unmasked, masked, at_target, has_grad = of_rows
    gradient = rows.new_gradient(in_place)
    call = BlockFunction(block_gradient, rows)
    for_block = int(not rows.can_be_viewed)  # its logits, overwritten with their gradient
    buffers = for_block + (masked[1] is not None and unmasked[1] is not None) + (unmasked[2] is not None)
    temperature = rows.temperature()
    # On a GPU, reading the answer would make the CPU wait, and masking rows costs nothing.
    all_have_grad = has_grad.device.type == "cpu" and bool(has_grad.all())
    for block, work in _blocks(call, rows, buffers):
        with call.attempt():
            x, out = rows.read_and_write_views(gradient, block, work)
            call(
                x,
                out,
                _of_rows(unmasked, block),
                _of_rows(masked, block),
                None if masked[1] is None or keep_mask is None else keep_mask[block],
                None if all_have_grad else has_grad[block, None],
                temperature,
                None if work is None else work[for_block:],
            )
            rows.write(gradient, block, out)
    places = rows.row_indices, local_target.clamp(min=0)
    gradient[places] = torch.where(local_target < 0, gradient[places], at_target.to(gradient.dtype))
    return gradient


def block_gradient(
    x: Tensor,
    out: Tensor,
    unmasked: SoftmaxGradient,
    masked: SoftmaxGradient,
    keep_mask: Tensor | None,
    has_grad: Tensor | None,
    temperature: Tensor | None,
    buffers: Tensor | None,
) -> None:
    """Write the gradient of logits ``x`` ``[rows, V / tp]`` into ``out``, which may be ``x`` itself.

    Args:
        buffers: ``[k, rows, V / tp]`` in the dtype of ``out``, to be overwritten: the first for a masked
            contribution beside an unmasked one, the last for ``z`` where there is a ``b``.
    """
    total: Tensor | None = None
    if keep_mask is not None:
        work = None if buffers is None else out if unmasked[1] is None else buffers[0]
        total = _contribution(x, masked, temperature, work, work).masked_fill_(~keep_mask, 0.0)
    if unmasked[1] is not None:
        exp_out = None if buffers is None else out
        z_out = exp_out if buffers is None or unmasked[2] is None else buffers[-1]
        part = _contribution(x, unmasked, temperature, z_out, exp_out)
        total = part if total is None else part.add_(total)
    if total is None:
        total = torch.zeros_like(out)
    if has_grad is not None:
        total.masked_fill_(~has_grad, 0.0)
    if total is not out:
        out.copy_(total)


def _contribution(
    x: Tensor,
    softmax: SoftmaxGradient,
    temperature: Tensor | None,
    z_out: Tensor | None,
    exp_out: Tensor | None,
) -> Tensor:
    """Return ``exp(z) * (a + b * z)``. Both buffers may be the same tensor if ``b`` is ``None``."""
    max_logit, a, b = softmax
    assert max_logit is not None and a is not None
    z = scaled_(torch.sub(x.to(max_logit.dtype), max_logit, out=z_out), temperature)
    if b is None:
        return exp(z, exp_out).mul_(a)
    z.clamp_(min=exp_floor(z.dtype))
    return exp(z, exp_out).mul_(z.mul_(b).add_(a))


def exp(z: Tensor, out: Tensor | None = None, *, scale: Tensor | None = None) -> Tensor:
    """Return ``exp(z / scale)`` by way of ``exp2``: on some CPUs ``torch.exp`` takes three times as long."""
    return torch.mul(z, _LOG2_E if scale is None else _LOG2_E / scale, out=out).exp2_()


def exp_floor(dtype: torch.dtype) -> float:
    """Return a ``z`` with ``exp(z) == 0`` to take the place of -inf, since ``0 * inf`` is not a number."""
    return -750.0 if dtype == torch.float64 else -110.0


def stretches(x: Tensor) -> Tensor:
    """Cut the last dimension into stretches of equal width: ``[..., V]`` as ``[..., stretches, columns]``."""
    width = _width_of_stretches(x.shape[-1])
    return x.unflatten(-1, (x.shape[-1] // width, width))  # type: ignore[no-untyped-call]


@lru_cache
def _width_of_stretches(columns: int) -> int:
    """Return a divisor of ``columns`` near ``_STRETCH``, or ``columns`` itself if there is none."""
    width = math.gcd(columns, _STRETCH)
    if width >= _SHORTEST_STRETCH:
        return width
    divisors = (width for width in range(8 * _STRETCH, _SHORTEST_STRETCH, -1) if columns % width == 0)
    return next(divisors, columns)


def sum_exp(z: Tensor) -> Tensor:
    """Return the sums of ``exp(z)`` over rows ``[rows, V]``, float64 ``[rows]``; ``z`` is overwritten."""
    return sum_of_columns(stretches(exp(z, out=z))).sum(1, dtype=torch.float64)


def sum_of_columns(x: Tensor) -> Tensor:
    """Sum ``[..., columns]`` over its columns, long stretches in float64."""
    return x.sum(-1, dtype=torch.float64 if x.shape[-1] > _LONGEST_STRETCH else None)


def scaled_(z: Tensor, temperature: float | Tensor | None) -> Tensor:
    """Divide differences ``z`` of logits in place. To divide the logits first would add a rounding error."""
    return z if temperature is None else z.div_(temperature)


def _with_target(statistics: Tensor, rows: SelectedRows, local_target: Tensor, keep_mask: Tensor) -> Tensor:
    """Add the target's own term to the statistics of the kept columns, where the mask leaves it out."""
    column = local_target.clamp(min=0)
    is_counted = (local_target < 0) | keep_mask.gather(1, column[:, None]).squeeze(1)
    logit = rows.logits.detach()[rows.row_indices, column].double()
    logit = torch.where(is_counted, _MINUS_INF, logit)
    of_target = torch.stack([logit, torch.zeros_like(logit)])
    return merge(torch.stack([statistics, of_target]), rows.options.scale)
