"""One block of rows after the other: how a tile is read, computed by functions, and written."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import VocabParallelOptions
from .compiling import BlockFunction
from .rows import STRETCH, SelectedRows, best_stretch

_MIB = 1 << 20
_SHORTEST_STRETCH = 64  # columns
#: Blocks of most compiled functions on a CPU are so many times as large as others.
COMPILED_BLOCKS = 8
_BLOCKS_OF_GPU = 16  # times the size of other blocks, so 1 GiB or more, for compiled functions on a GPU


class Block(NamedTuple):
    """Some rows of a tile.

    Attributes:
        x: their logits ``[rows, V / tp]``, cut by ``cut``.
        out: where to write their gradient; perhaps the same object, so that a compiler knows it.
        rows: which of the tile's rows.
        work: buffers ``[k, rows, V / tp]`` for plain operators, the first of which may be ``x``.
        function: what computes the block.
        is_compiled: whether the function is compiled.
        cut: returns what the function gets in place of a tensor ``[..., V / tp]``.
    """

    x: Tensor
    out: Tensor
    rows: slice
    work: Tensor
    function: Callable[..., Any]
    is_compiled: bool
    cut: Callable[[Tensor], Tensor]

    def part(self, values: Tensor | None) -> Tensor | None:
        """Return the block's rows of ``values`` ``[n, 1]`` or ``[n, V / tp]``, cut as its logits are."""
        return None if values is None else self.cut(values[self.rows])


def each_block(
    rows: SelectedRows,
    function: Callable[..., Any],
    of_block: Callable[[Block], None],
    *,
    buffers: int = 0,
    has_work: bool = True,
    scale: int = 0,
    scale_on_gpu: int = _BLOCKS_OF_GPU,
    gradient: Tensor | None = None,
) -> None:
    """Call ``of_block`` for one block of rows after the other.

    Args:
        function: what computes a block; it is compiled for large logits, see :class:`.BlockFunction`.
        buffers: how many buffers of a block's size plain operators need.
        has_work: they get these buffers.
        scale: a compiled function gets blocks that are so many times as large, since it needs no buffers that
            have to fit into the cache; 0: nothing is compiled. Copies of single rows have to fit.
        scale_on_gpu: the same on a GPU.
        gradient: ``[T, V / tp]``, to be written in these rows.
    """
    is_elementwise, done, no_buffers = gradient is not None, 0, rows.logits.new_empty(0)
    call = BlockFunction(function, rows.options.fused, rows.num_logits, rows.device.type, is_elementwise)
    # On a CPU, what is computed for each logit alone is faster in one loop over a row.
    cut_for_compiler = _as_one_stretch if is_elementwise and rows.device.type == "cpu" else stretches
    compiled_bytes = row_bytes = rows.width * rows.dtype.itemsize
    if isinstance(rows.index, Tensor):
        scale = min(scale, 1)
    elif rows.device.type == "cuda":
        # Nothing is copied, and each call is a handful of kernels.
        scale, compiled_bytes = scale and scale_on_gpu, rows.width * rows.logits.itemsize

    def compute(part: slice, place: slice | Tensor, work: Tensor, function: Any, is_compiled: bool) -> None:
        x, out = _read(rows, place, gradient, work[0] if len(work) else None)
        cut = cut_for_compiler if is_compiled else _uncut
        cut_x = cut(x)
        of_block(Block(cut_x, cut_x if out is x else cut(out), part, work, function, is_compiled, cut))
        if gradient is not None:
            _write(gradient, place, out)

    if scale and call.compiled:
        for part, place in rows.cut(rows_of_block(rows.logits, rows.options, compiled_bytes, scale)):
            if not call.attempt(partial(compute, part, place, no_buffers, call, True)):
                break  # these rows come again, for plain operators
            done = part.stop
    parts = rows.cut(rows_of_block(rows.logits, rows.options, row_bytes * max(buffers, 1)), done)
    most = max((part.stop - part.start for part, _ in parts), default=0)
    work = rows.logits.new_empty((buffers * has_work, most, rows.width), dtype=rows.dtype)
    for part, place in parts:
        compute(part, place, work[:, : part.stop - part.start], function, False)


def _read(
    rows: SelectedRows, place: slice | Tensor, gradient: Tensor | None, buffer: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the logits of a block, as a view or copied, and where to write their gradient."""
    logits = rows.logits
    if gradient is not None and isinstance(place, slice) and (rows.can_be_viewed or buffer is None):
        x = logits[place]
        # Tensors without elements have the same address, whether they share memory or not.
        in_place = gradient.numel() > 0 and gradient.data_ptr() == logits.data_ptr()
        return x, x if in_place else gradient[place]
    if buffer is not None and isinstance(place, Tensor) and logits.dtype == buffer.dtype:
        x = torch.index_select(logits, 0, place, out=buffer)
    else:
        x = logits[place] if isinstance(place, slice) else logits.index_select(0, place)
        if buffer is not None and x.dtype != buffer.dtype:
            x = buffer.copy_(x)
    return x, x


def _write(gradient: Tensor, place: slice | Tensor, values: Tensor) -> None:
    """Put the gradient of a block where it belongs, unless it was computed there."""
    if isinstance(place, Tensor):
        gradient.index_copy_(0, place, values.to(gradient.dtype))
    elif (of_block := gradient[place]).data_ptr() != values.data_ptr():
        of_block.copy_(values)


def rows_of_block(logits: Tensor, options: VocabParallelOptions, row_bytes: int, scale: int = 1) -> int:
    """Return how many rows of so many bytes fit into ``block_bytes``, or its default times ``scale``.

    On a CPU the default is what stays in the cache, 2 MiB per thread, but at most 1% of the logits, and at
    least 1 MiB. On a GPU it is what keeps the device busy: 64 MiB, or 1% of the logits if that is more.
    """
    size = options.block_bytes
    if size is None:
        size = logits.numel() * logits.element_size() // 100
        if logits.device.type == "cpu":
            size = max(min(2 * _MIB * torch.get_num_threads(), size), _MIB) * scale
        else:
            size = max(64 * _MIB, size) * scale
    return max(1, size // max(row_bytes, 1))


def stretches(x: Tensor) -> Tensor:
    """Cut the last dimension into stretches of equal width: ``[..., V]`` as ``[..., stretches, columns]``."""
    width = _width_of_stretches(x.shape[-1], best_stretch(x.device))
    return x.unflatten(-1, (x.shape[-1] // width, width))  # type: ignore[no-untyped-call]


def _as_one_stretch(x: Tensor) -> Tensor:
    return x.unsqueeze(-2)


def _uncut(x: Tensor) -> Tensor:
    return x


@lru_cache
def _width_of_stretches(columns: int, best: int) -> int:
    """Return a divisor of ``columns`` near the best width, or ``columns`` itself if there is none."""
    width = math.gcd(columns, best)
    if width >= _SHORTEST_STRETCH:
        return width
    divisors = (width for width in range(8 * STRETCH, _SHORTEST_STRETCH, -1) if columns % width == 0)
    return next(divisors, columns)
