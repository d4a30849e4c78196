"""The tiles of an output layer's logits, and the gradients of hidden states and weight from those of tiles.

A tile of logits is one matrix product of the selected hidden states with some rows of the weight. Forward
reads it and forgets it; backward multiplies again, turns the tile into its gradient in place, and multiplies
that once for the hidden states and once for the weight. So memory is one tile, whatever the vocabulary is.

Tiles have all selected rows and few columns where they can: the weight's gradient of a tile is then complete,
and the sum over tiles, which the gradient of the hidden states is, has few terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from .autograd import gradients_of_inputs, save_source, without_autocast
from .overwriting import StorageClaim
from .rows import Inputs, LogitSource, SelectedRows, Tile, TileGradient

_MIB = 1 << 20
_FEWEST_COLUMNS = 1024
# Larger tiles have a multiple of so many columns, see softmax.stretches.
_ALIGNMENT = 256
# Where torch has no product of 16-bit matrices with a float32 result, so many of their columns are converted
# to float32 at a time.
_CONVERTED_COLUMNS = 512
# Where torch has such a product, so large a part of it is made at a time.
_PRODUCT_BYTES = 128 * _MIB


class MainGradient(Protocol):
    """A buffer of its own for a weight's gradient, as Megatron's ``main_grad``."""

    def buffer(self) -> Tensor | None:
        """Return the tensor ``[V / tp, h]`` to add to, or ``None`` if the gradient goes to autograd."""

    def added(self) -> Tensor | None:
        """Return what autograd gets in place of the gradient, which has been added to the buffer."""


@dataclass(frozen=True)
class TileOptions:
    """How much memory the tiles of an output layer may take.

    Attributes:
        tile_bytes: size of a tile; ``None``: 64 MiB on a CPU and 512 MiB on a GPU.
        keep_bytes: size of all tiles that forward keeps for backward, which need not be computed again.
        main_gradient: where the weight's gradient goes; ``None``: to autograd.
    """

    tile_bytes: int | None = None
    keep_bytes: int = 0
    main_gradient: MainGradient | None = None

    def elements(self, like: Tensor) -> int:
        """Return how many logits of a dtype and a device one tile has."""
        default = 64 * _MIB if like.device.type == "cpu" else 512 * _MIB
        return max((self.tile_bytes or default) // like.element_size(), 1)


@dataclass(frozen=True, eq=False)
class HeadLogits(LogitSource):
    """Rows of ``hidden @ weight.T + bias``, which exist one tile at a time.

    Attributes:
        hidden: ``[T, h]``.
        weight: ``[V / tp, h]``, this rank's part of the output layer. Where nothing has a gradient it may be
            on another device than the hidden states, which gets one tile's part of it at a time.
        bias: ``[V / tp]``, where the weight is.
        keeps_tiles: whether tiles may be kept for a backward.
        kept_tiles: the tiles that have been kept, by their first row and column.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    index: slice | Tensor
    options: TileOptions
    block_bytes: int | None = None
    inplace_backward: bool = False
    keeps_tiles: bool = False
    kept_tiles: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    names = {  # noqa: RUF012
        "hidden": "the hidden states",
        "weight": "the weight of the output layer",
        "bias": "its bias",
    }

    @property
    def width(self) -> int:
        return len(self.weight)

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def is_elsewhere(self) -> bool:
        """Whether the weight has to be copied to the device; a tile's part of it is no larger than a tile."""
        return self.weight.device != self.device

    @property
    def is_frozen(self) -> bool:
        """Whether a backward needs the gradient of the hidden states, and no other gradient."""
        has_bias_gradient = self.bias is not None and self.bias.requires_grad
        return (
            self.keeps_tiles
            and self.hidden.requires_grad
            and not (self.weight.requires_grad or has_bias_gradient)
        )

    def claim(self) -> StorageClaim:
        return StorageClaim(self.inplace_backward)

    def tiles(self) -> Iterator[Tile]:
        hidden_nh = self._selected_hidden()
        row_ranges, column_ranges = self.cut(self.n, self.width)
        size = row_ranges[0].stop * column_ranges[0].stop
        buffer: Tensor | None = None
        left = self.options.keep_bytes if self.keeps_tiles else 0
        for columns in column_ranges:
            weight, bias = self.columns(columns)
            for rows in row_ranges:
                shape = rows.stop - rows.start, columns.stop - columns.start
                place = rows.start, columns.start
                logits = self.kept_tiles.pop(place, None)
                if logits is None:
                    left -= shape[0] * shape[1] * hidden_nh.element_size()
                    if left >= 0:
                        logits = self.kept_tiles[place] = hidden_nh.new_empty(shape)
                    else:
                        buffer = hidden_nh.new_empty(size) if buffer is None else buffer
                        logits = buffer[: shape[0] * shape[1]].view(shape)
                    if bias is None:
                        torch.mm(hidden_nh[rows], weight.T, out=logits)
                    else:
                        torch.addmm(bias, hidden_nh[rows], weight.T, out=logits)
                selected = SelectedRows(
                    logits, slice(0, shape[0]), self.block_bytes, num_logits=self.n * self.width
                )
                yield Tile(selected, rows, columns)

    def part(self, rows: slice, columns: slice) -> Tensor:
        return torch.nn.functional.linear(self._selected_hidden()[rows], *self.columns(columns))

    def columns(self, columns: slice) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of some columns, on the device of the hidden states."""
        # A copy to host memory must have ended before it is read.
        is_gpu = self.device.type == "cuda"
        weight = self.weight.detach()[columns].to(self.device, non_blocking=is_gpu)
        bias = None if self.bias is None else self.bias.detach()[columns]
        return weight, None if bias is None else bias.to(self.device, non_blocking=is_gpu)

    def gradients(self, compute: TileGradient, needed: Sequence[bool]) -> Inputs:
        sums = _Gradients(self, self._selected_hidden(), needed)
        for tile in self.tiles():
            sums.add(tile.rows, tile.columns, compute(tile, True))
        return sums.totals()

    def gradients_of(self, gradient: Tensor, needed: Sequence[bool]) -> Inputs:
        """Return the gradients of the inputs from that of all logits ``[n, V / tp]``."""
        sums = _Gradients(self, self._selected_hidden(), needed)
        sums.add(slice(0, self.n), slice(0, self.width), gradient)
        return sums.totals()

    def spread(self, of_selected: Tensor) -> Tensor:
        """Return the gradient of all hidden states ``[T, h]`` from that of the selected rows."""
        of_selected = of_selected.to(self.hidden.dtype)
        if self.n == len(self.hidden) and isinstance(self.index, slice):
            return of_selected
        gradient = torch.zeros_like(self.hidden)
        if isinstance(self.index, slice):
            gradient[self.index] = of_selected
            return gradient
        return gradient.index_add_(0, self.index, of_selected)

    def select(
        self, index: slice | Tensor, block_bytes: int | None = None, inplace_backward: bool = False
    ) -> HeadLogits:
        return replace(super().select(index, block_bytes, inplace_backward), kept_tiles={})

    def _selected_hidden(self) -> Tensor:
        hidden = self.hidden.detach()
        return hidden[self.index] if isinstance(self.index, slice) else hidden.index_select(0, self.index)

    def sharing(self, count: int) -> HeadLogits:
        """Return the same rows with smaller tiles, of which so many take the memory of one."""
        tile_bytes = self.options.elements(self.hidden) * self.hidden.element_size()
        return replace(self, options=replace(self.options, tile_bytes=max(tile_bytes // count, 1)))

    def cut(self, n: int, width: int) -> tuple[list[slice], list[slice]]:
        """Return the rows and the columns of the tiles of ``n`` rows and so many columns."""
        elements = self.options.elements(self.hidden)
        most_columns = max(elements // max(n, 1), min(elements, _FEWEST_COLUMNS))
        if self.is_elsewhere:
            most_columns = max(min(most_columns, elements // self.weight.shape[1]), 1)
        count = -(-width // most_columns)
        columns = -(-width // count)
        columns = min(-(-columns // _ALIGNMENT) * _ALIGNMENT if columns > _ALIGNMENT else columns, width)
        rows = max(min(elements // columns, n), 1)
        return _ranges(n, rows) or [slice(0, 0)], _ranges(width, columns)


class _Gradients:
    """Sums the gradients of hidden states, weight and bias over tiles."""

    def __init__(self, head: HeadLogits, hidden_nh: Tensor, needed: Sequence[bool]) -> None:
        self._head, self._hidden_nh, self._weight = head, hidden_nh, head.weight.detach()
        self._needs_weight = needed[1]
        self._of_hidden = hidden_nh.new_zeros(hidden_nh.shape, dtype=head.dtype) if needed[0] else None
        main = head.options.main_gradient
        self._main = main.buffer() if main is not None and self._needs_weight else None
        self._of_weight = torch.empty_like(self._weight) if needed[1] and self._main is None else None
        self._of_columns: Tensor | None = None  # the weight's gradient of columns whose tiles are being added
        self._of_bias = hidden_nh.new_zeros(head.width, dtype=head.dtype) if needed[2] else None

    def add(self, rows: slice, columns: slice, gradient: Tensor) -> None:
        """Add what the gradient ``[rows, columns]`` of a tile contributes."""
        if self._of_hidden is not None:
            add_product(self._of_hidden[rows], gradient, self._weight[columns], may_round=True)
        if self._needs_weight:
            self._add_to_weight(gradient.T, self._hidden_nh[rows], rows, columns)
        if self._of_bias is not None:
            self._of_bias[columns] += gradient.sum(0, dtype=self._of_bias.dtype)

    def _add_to_weight(self, gradient: Tensor, hidden: Tensor, rows: slice, columns: slice) -> None:
        if self._main is not None:
            add_product(self._main[columns], gradient, hidden)
            return
        assert self._of_weight is not None
        if len(hidden) == len(self._hidden_nh):
            torch.mm(gradient, hidden, out=self._of_weight[columns])
            return
        # Sums of several products are rounded once, at the end.
        if rows.start == 0:
            self._of_columns = hidden.new_zeros((len(gradient), hidden.shape[1]), dtype=self._head.dtype)
        assert self._of_columns is not None
        add_product(self._of_columns, gradient, hidden)
        if rows.stop == len(self._hidden_nh):
            self._of_weight[columns] = self._of_columns

    def totals(self) -> Inputs:
        """Return the gradients of hidden states, weight and bias, in their dtypes."""
        head, main, of_weight = self._head, self._head.options.main_gradient, self._of_weight
        if self._main is not None and main is not None:
            of_weight = main.added()
        return (
            None if self._of_hidden is None else head.spread(self._of_hidden),
            of_weight,
            None if self._of_bias is None or head.bias is None else self._of_bias.to(head.bias.dtype),
        )


def sum_of_logits(head: HeadLogits) -> Tensor:
    """Return the sum of all logits of the selected rows, without computing any, in ``head.dtype``."""
    return _SumOfLogits.apply(head, *head.inputs)  # type: ignore[no-untyped-call]


class _SumOfLogits(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, head: HeadLogits, *inputs: Tensor | None) -> Tensor:
        hidden_h = head._selected_hidden().sum(0, dtype=head.dtype)
        weight_h = head.weight.detach().sum(0, dtype=head.dtype).to(head.device)
        save_source(ctx, head, {"hidden_h": hidden_h, "weight_h": weight_h})
        total = hidden_h @ weight_h
        if head.bias is not None and head.n:
            total = total + head.n * head.bias.detach().sum(dtype=head.dtype).to(head.device)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *gradients_of_inputs(ctx, _gradients_of_sum, gradient)


def _gradients_of_sum(ctx: Any, head: HeadLogits, saved: dict[str, Tensor], gradient: Tensor) -> Inputs:
    hidden_h, weight_h = saved["hidden_h"], saved["weight_h"]
    of_hidden = of_weight = of_bias = None
    _, needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad
    if needs_hidden:
        of_hidden = head.spread((gradient * weight_h).expand(head.n, -1))
    if needs_weight:
        main = head.options.main_gradient
        of_weight = (gradient * hidden_h).to(head.weight.dtype).expand_as(head.weight)
        if main is not None and (buffer := main.buffer()) is not None:
            buffer += of_weight
            of_weight = main.added()
    if needs_bias and head.bias is not None:
        of_bias = (gradient * head.n).to(head.bias.dtype).expand_as(head.bias)
    return of_hidden, of_weight, of_bias


@without_autocast
def largest_logits(head: HeadLogits) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each selected row and its column, of equal ones the first; no gradient."""
    largest = head.hidden.new_full((head.n,), float("-inf"))
    columns = torch.zeros(head.n, dtype=torch.int64, device=head.device)
    for tile in head.detached().tiles():
        values, indices = tile.logits.read(slice(0, tile.logits.n), None).max(1)
        # Tiles come in the order of their columns. NaN counts as larger than any number.
        is_larger = (values > largest[tile.rows]) | (values.isnan() & ~largest[tile.rows].isnan())
        largest[tile.rows] = values.where(is_larger, largest[tile.rows])
        columns[tile.rows] = (indices + tile.columns.start).where(is_larger, columns[tile.rows])
    return largest, columns


def add_product(total: Tensor, a: Tensor, b: Tensor, *, may_round: bool = False) -> None:
    """Add ``a @ b`` to ``total``, in the precision of ``total``, which may be higher than that of both.

    With ``may_round`` a product of bfloat16 matrices is rounded to bfloat16 where torch has no product with
    another dtype, as on a CPU. (A sum in float16 may be beyond its range.)
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.device.type == "cuda" and _HAS_MIXED_PRODUCT:
        # The product is a tensor of its own. Of few rows of logits it would be as large as the weight.
        for rows in _ranges(len(a), max(_PRODUCT_BYTES // (b.shape[1] * total.element_size()), 1)):
            total[rows].add_(torch.mm(a[rows], b, out_dtype=total.dtype))
    elif may_round and a.dtype == torch.bfloat16:
        total += torch.mm(a, b)
    else:
        for part in _ranges(len(b), _CONVERTED_COLUMNS):
            total.addmm_(a[:, part].to(total.dtype), b[part].to(total.dtype))


_HAS_MIXED_PRODUCT = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)


def _ranges(size: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]
