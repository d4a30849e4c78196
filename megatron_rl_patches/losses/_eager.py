"""Softmax statistics and gradients of a rank's own logits with plain operators, one block of rows at a time.

Every operator writes into buffers of one block, which stay in the cache. ``torch.softmax`` has the fastest
``exp`` of torch on a CPU, but the sum that it divides by is rounded in float32: everything here is taken
relative to the largest probability of the row, where that sum cancels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._shard import Shard, Target, Term, floor


def statistics(shard: Shard, column: Tensor, entropy: bool) -> list[Tensor]:
    """See :func:`._local.statistics`."""
    masked = shard.keep_mask is not None
    sizes = ([2] if masked else []) + ([3] if entropy else [] if masked else [2])
    found = [shard.logits.new_empty((size, shard.n), dtype=shard.dtype) for size in sizes]
    blocks = shard.blocks(buffers=1 + entropy)
    scratch = scratch_buffers(shard, blocks, buffers=1 + entropy)
    for block in blocks:
        work, *spare = scratch[:, : block.stop - block.start]
        if masked:
            x = _kept(shard, block, column[block], work)
            block_statistics(x, shard.temperature, work, None, found[0][:, block])
        if entropy or not masked:
            x = read(shard, block, work)
            block_statistics(x, shard.temperature, work, spare[0] if entropy else None, found[-1][:, block])
    return found


def block_statistics(x: Tensor, temperature: float, work: Tensor, spare: Tensor | None, out: Tensor) -> None:
    """Fill ``out`` with ``(top, rest)`` of each row, and with a ``spare`` buffer ``(top, rest, moment)``."""
    top, column = _largest(x)
    if spare is not None or temperature != 1:
        x = _scaled(x, top, temperature, out=work)
    p = torch.softmax(x, 1, out=work if spare is None else spare)
    peak = p.gather(1, column).squeeze(1)
    rest = p.scatter_(1, column, 0.0).sum(1) / peak
    empty = top.squeeze(1) == float("-inf")
    out[0] = top.squeeze(1)
    out[1] = torch.where(empty, -1.0, rest)
    if spare is not None:
        out[2] = torch.where(empty, 0.0, x.clamp_(min=floor(x.dtype)).mul_(p).sum(1) / peak)


def _largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x.max(1, keepdim=True)``, but at the speed of ``amax``: only the stretch that has it is searched."""
    width = math.gcd(x.shape[1], 256)
    if width < 32:
        return x.max(1, keepdim=True)
    stretches = x.unflatten(1, (-1, width))  # type: ignore[no-untyped-call]
    top, stretch = stretches.amax(2).max(1, keepdim=True)
    candidates = stretches.gather(1, stretch[:, :, None].expand(-1, 1, width))
    return top, stretch * width + candidates.argmax(2)


def gradient(shard: Shard, kept: Term | None, full: Term | None, target: Target, in_place: bool) -> Tensor:
    """See :func:`._local.gradient`."""
    out = shard.gradient_buffer(in_place)
    direct = isinstance(shard.rows, slice) and out.dtype == shard.dtype
    needs_z = full is not None and full.b is not None
    buffers = (not direct) + needs_z + (kept is not None and full is not None)
    blocks = shard.blocks(buffers)
    scratch = scratch_buffers(shard, blocks, buffers)
    for block in blocks:
        spares = list(scratch[:, : block.stop - block.start])
        result = shard.view(out, block) if direct else spares.pop()
        column = target.column[block]
        if kept is not None:
            part = result if full is None else spares.pop()
            _kept(shard, block, column, part)
            fill(part, part, kept.of(block), shard.temperature, out=part)
        if full is not None:
            work = spares.pop() if needs_z else result
            fill(read(shard, block, work), work, full.of(block), shard.temperature, out=result)
            if kept is not None:
                result.add_(part)
        _put(result, column, target.value[block])
        _zero(result, ~target.counts[block])
        if not direct:
            write(shard, out, block, result)
    return out


def fill(x: Tensor, work: Tensor, term: Term, temperature: float, out: Tensor) -> None:
    """Write the term into ``out``. All three buffers may be one, ``out`` and ``work`` only without ``b``."""
    if term.b is not None or temperature != 1:
        x = _scaled(x, term.top, temperature, out=work)
    p = torch.softmax(x, 1, out=out)
    to_exp_z = term.share / p.amax(1, keepdim=True)
    if term.b is None:
        p.mul_(term.a * to_exp_z)
    else:
        p.mul_(x.clamp_(min=floor(x.dtype)).mul_(term.b * to_exp_z).add_(term.a * to_exp_z))
    _zero(p, term.share == 0)


def scratch_buffers(shard: Shard, blocks: list[slice], buffers: int) -> Tensor:
    rows = blocks[0].stop - blocks[0].start if blocks else 0
    return shard.logits.new_empty((buffers, rows, shard.logits.shape[1]), dtype=shard.dtype)


def read(shard: Shard, block: slice, buffer: Tensor) -> Tensor:
    """The logits of a block in the buffer's dtype: themselves where possible, else copied into it."""
    if isinstance(shard.rows, slice):
        x = shard.view(shard.logits, block)
        return x if x.dtype == buffer.dtype else buffer.copy_(x)
    if shard.logits.dtype == buffer.dtype:
        return torch.index_select(shard.logits, 0, shard.rows[block], out=buffer)
    return buffer.copy_(shard.logits.index_select(0, shard.rows[block]))


def _kept(shard: Shard, block: slice, column: Tensor, buffer: Tensor) -> Tensor:
    """The logits of a block in ``buffer``, -inf where neither kept nor the target."""
    assert shard.keep_mask is not None
    x = read(shard, block, buffer)
    of_target = x.gather(1, column.clamp(min=0))
    torch.where(shard.keep_mask[block], x, x.new_tensor(float("-inf")), out=buffer)
    _put(buffer, column, of_target)
    return buffer


def write(shard: Shard, out: Tensor, block: slice, values: Tensor) -> None:
    if isinstance(shard.rows, slice):
        shard.view(out, block).copy_(values)
    else:
        out.index_copy_(0, shard.rows[block], values.to(out.dtype))


def _scaled(x: Tensor, top: Tensor, temperature: float, out: Tensor) -> Tensor:
    """``z``. The subtraction comes first: it is all but exact, where ``x / temperature`` would be rounded."""
    torch.sub(x, top, out=out)
    return out if temperature == 1 else out.div_(temperature)


def _put(block: Tensor, column: Tensor, value: Tensor) -> None:
    index = column.clamp(min=0)
    block.scatter_(1, index, torch.where(column < 0, block.gather(1, index), value))


def _zero(block: Tensor, rows: Tensor) -> None:
    # Filled rather than multiplied: these rows may hold NaN. Asking a GPU would stop it.
    if block.device.type != "cpu" or rows.any():
        block.masked_fill_(rows, 0.0)
