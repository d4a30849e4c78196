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
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from .autograd import LogitFunction, Tensors, without_autocast
from .options import DEFAULT, VocabParallelOptions, check_integer
from .rows import Inputs, LogitSource, SelectedRows, Tile, TileGradient, ranges

_MIB = 1 << 20
_FEWEST_COLUMNS = 1024
# Larger tiles have a multiple of so many columns, see softmax.stretches.
_ALIGNMENT = 256
_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
# Where torch has no product of 16-bit matrices with a float32 result, so many of their columns are converted
# to float32 at a time.
_CONVERTED_COLUMNS = 512
# Where torch has such a product, but does not add it to a float32 tensor, so large a part of it is computed
# at a time. The product of few rows of logits would be as large as the weight.
_PRODUCT_BYTES = 128 * _MIB
#: What ``keep_bytes="auto"`` may keep on each GPU, from the first backward on.
_automatic: dict[torch.device, int] = {}

KeepBytes = int | Literal["auto"]


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
        keep_bytes: see :func:`.deferred_logits`.
        main_gradient: where the weight's gradient goes; ``None``: to autograd.
    """

    tile_bytes: int | None = None
    keep_bytes: KeepBytes = 0
    main_gradient: MainGradient | None = None

    def __post_init__(self) -> None:
        if self.tile_bytes is not None:
            check_integer("tile_bytes", self.tile_bytes, 1, "a number of bytes")
        if self.keep_bytes != "auto":
            check_integer("keep_bytes", self.keep_bytes, 0, 'a number of bytes, or "auto"')

    def elements(self, like: Tensor) -> int:
        """Return how many logits of a dtype and a device one tile has."""
        default = 64 * _MIB if like.device.type == "cpu" else 512 * _MIB
        return max((self.tile_bytes or default) // like.element_size(), 1)

    def bytes_to_keep(self, device: torch.device) -> int:
        """Return how many bytes of logits a forward may keep on the device."""
        if self.keep_bytes != "auto":
            return self.keep_bytes
        return _half_of_free_memory(device) if device in _automatic else 0

    def backward_ran(self, device: torch.device) -> None:
        """Let ``keep_bytes="auto"`` see how much memory is free on a GPU at its first backward."""
        if self.keep_bytes == "auto" and device.type == "cuda" and device not in _automatic:
            _half_of_free_memory(device)


@dataclass(frozen=True, eq=False)
class OutputLayerRows(LogitSource):
    """Rows of the logits ``hidden @ weight.T + bias`` of an output layer, which exist one tile at a time.

    Attributes:
        hidden: ``[T, h]``.
        weight: ``[V / tp, h]``, this rank's part; see :func:`.deferred_logits`, as for the bias ``[V / tp]``.
        keeps_tiles: whether tiles may be kept for a backward.
        kept_tiles: the tiles that have been kept, by their first row and column.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    index: slice | Tensor
    tiling: TileOptions
    options: VocabParallelOptions = DEFAULT
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
    def is_elsewhere(self) -> bool:
        """Whether the weight has to be copied to the device; a tile's part of it is no larger than a tile."""
        return self.weight.device != self.hidden.device

    @property
    def is_frozen(self) -> bool:
        has_bias_gradient = self.bias is not None and self.bias.requires_grad
        return (
            self.keeps_tiles
            and self.hidden.requires_grad
            and not (self.weight.requires_grad or has_bias_gradient)
        )

    def tiles(self) -> Iterator[Tile]:
        hidden_nh = self.selected_hidden()
        row_ranges, column_ranges = self.cut(self.n, self.width)
        size = row_ranges[0].stop * column_ranges[0].stop
        buffer: Tensor | None = None
        left = self.tiling.bytes_to_keep(self.device) if self.keeps_tiles else -1
        for columns in column_ranges:
            weight, bias = self._layer(columns)
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
                selected = SelectedRows(logits, slice(0, shape[0]), self.options, self.n * self.width)
                yield Tile(selected, rows, columns)

    def part(self, rows: slice, columns: slice) -> Tensor:
        return torch.nn.functional.linear(self.selected_hidden()[rows], *self._layer(columns))

    def _layer(self, columns: slice) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of some columns, on the device of the hidden states."""
        # A copy to host memory must have ended before it is read.
        is_gpu = self.hidden.device.type == "cuda"
        weight = self.weight.detach()[columns].to(self.hidden.device, non_blocking=is_gpu)
        bias = None if self.bias is None else self.bias.detach()[columns]
        return weight, None if bias is None else bias.to(self.hidden.device, non_blocking=is_gpu)

    def selected_hidden(self) -> Tensor:
        """Return the hidden states of the selected rows, ``[n, h]``, without a graph."""
        hidden = self.hidden.detach()
        return hidden[self.index] if isinstance(self.index, slice) else hidden.index_select(0, self.index)

    def gradients(self, compute: TileGradient, needed: Sequence[bool]) -> Inputs:
        sums = _Gradients(self, needed)
        # Gradients take the place of the tiles' logits, so none is kept for another backward.
        for tile in replace(self, keeps_tiles=False).tiles():
            sums.add(tile.rows, tile.columns, compute(tile, True))
        self.tiling.backward_ran(self.device)
        return sums.totals()

    def gradients_of(self, gradient: Tensor, needed: Sequence[bool]) -> Inputs:
        """Return the gradients of the inputs from that of all logits ``[n, V / tp]``."""
        sums = _Gradients(self, needed)
        sums.add(slice(0, self.n), slice(0, self.width), gradient)
        return sums.totals()

    def spread(self, of_selected: Tensor) -> Tensor:
        """Return the gradient of all hidden states ``[T, h]`` from that of the selected rows."""
        of_selected = of_selected.to(self.hidden.dtype)
        if self.n == len(self.hidden) and isinstance(self.index, slice):
            return of_selected
        gradient = torch.zeros_like(self.hidden)
        if isinstance(self.index, Tensor):
            return gradient.index_add_(0, self.index, of_selected)
        gradient[self.index] = of_selected
        return gradient

    def sharing(self, count: int) -> OutputLayerRows:
        tile_bytes = self.tiling.elements(self.hidden) * self.hidden.element_size()
        return replace(self, tiling=replace(self.tiling, tile_bytes=max(tile_bytes // count, 1)))

    def keeping_tiles(self, keeps: bool) -> OutputLayerRows:
        return replace(self, keeps_tiles=keeps, kept_tiles={})

    def cut(self, n: int, width: int) -> tuple[list[slice], list[slice]]:
        """Return the rows and the columns of the tiles of ``n`` rows and so many columns."""
        elements = self.tiling.elements(self.hidden)
        most_columns = max(elements // max(n, 1), min(elements, _FEWEST_COLUMNS))
        if self.is_elsewhere:
            most_columns = max(min(most_columns, elements // self.weight.shape[1]), 1)
        count = -(-width // most_columns)
        columns = -(-width // count)
        columns = min(-(-columns // _ALIGNMENT) * _ALIGNMENT if columns > _ALIGNMENT else columns, width)
        rows = max(min(elements // columns, n), 1)
        return ranges(n, rows) or [slice(0, 0)], ranges(width, columns)


class _Gradients:
    """Sums the gradients of hidden states, weight and bias over tiles."""

    def __init__(self, layer: OutputLayerRows, needed: Sequence[bool]) -> None:
        self._layer, self._weight, self._hidden_nh = layer, layer.weight.detach(), layer.selected_hidden()
        needs_hidden, needs_weight, needs_bias = needed
        main = layer.tiling.main_gradient
        zeros, dtype = self._hidden_nh.new_zeros, layer.dtype
        self._of_hidden = zeros(self._hidden_nh.shape, dtype=dtype) if needs_hidden else None
        self._main = main.buffer() if main is not None and needs_weight else None
        self._of_weight = torch.empty_like(self._weight) if needs_weight and self._main is None else None
        self._of_columns: Tensor | None = None  # the weight's gradient of columns whose tiles are being added
        self._of_bias = zeros(layer.width, dtype=dtype) if needs_bias else None

    def add(self, rows: slice, columns: slice, gradient: Tensor) -> None:
        """Add what the gradient ``[rows, columns]`` of a tile contributes."""
        if self._of_hidden is not None:
            add_product(self._of_hidden[rows], gradient, self._weight[columns], may_round=True)
        if self._main is not None:
            add_product(self._main[columns], gradient.T, self._hidden_nh[rows])
        elif self._of_weight is not None:
            self._add_to_weight(self._of_weight[columns], gradient.T, rows)
        if self._of_bias is not None:
            self._of_bias[columns] += gradient.sum(0, dtype=self._of_bias.dtype)

    def _add_to_weight(self, of_weight: Tensor, gradient: Tensor, rows: slice) -> None:
        hidden = self._hidden_nh[rows]
        if len(hidden) == len(self._hidden_nh):
            torch.mm(gradient, hidden, out=of_weight)
            return
        # Sums of several products are rounded once, at the end.
        if rows.start == 0:
            self._of_columns = torch.zeros_like(of_weight, dtype=self._layer.dtype)
        assert self._of_columns is not None
        add_product(self._of_columns, gradient, hidden)
        if rows.stop == len(self._hidden_nh):
            of_weight.copy_(self._of_columns)

    def totals(self) -> Inputs:
        """Return the gradients of hidden states, weight and bias, in their dtypes."""
        layer, main = self._layer, self._layer.tiling.main_gradient
        return (
            None if self._of_hidden is None else layer.spread(self._of_hidden),
            self._of_weight if self._main is None or main is None else main.added(),
            None if self._of_bias is None or layer.bias is None else self._of_bias.to(layer.bias.dtype),
        )


class SumOfLogits(LogitFunction):
    """The sum of all logits of the selected rows, without computing any, in the layer's ``dtype``."""

    def forward(self, layer: OutputLayerRows, tensors: Tensors) -> tuple[list[Tensor], Tensors]:
        hidden_h = layer.selected_hidden().sum(0, dtype=layer.dtype)
        weight_h = layer.weight.detach().sum(0, dtype=layer.dtype).to(layer.device)
        total = hidden_h @ weight_h
        if layer.bias is not None and layer.n:
            total = total + layer.n * layer.bias.detach().sum(dtype=layer.dtype).to(layer.device)
        return [total], {"hidden_h": hidden_h, "weight_h": weight_h}

    def gradients(
        self, layer: OutputLayerRows, saved: Tensors, needed: Sequence[bool], *gradients: Any
    ) -> Inputs:
        (gradient,), (needs_hidden, needs_weight, needs_bias) = gradients, needed
        of_hidden = of_weight = of_bias = None
        if needs_hidden:
            of_hidden = layer.spread((gradient * saved["weight_h"]).expand(layer.n, -1))
        if needs_weight:
            main = layer.tiling.main_gradient
            of_weight = (gradient * saved["hidden_h"]).to(layer.weight.dtype).expand_as(layer.weight)
            if main is not None and (buffer := main.buffer()) is not None:
                buffer += of_weight
                of_weight = main.added()
        if needs_bias and layer.bias is not None:
            of_bias = (gradient * layer.n).to(layer.bias.dtype).expand_as(layer.bias)
        return of_hidden, of_weight, of_bias


@without_autocast
def largest_logits(layer: OutputLayerRows) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each selected row and its column, of equal ones the first; no gradient."""
    largest = layer.hidden.new_full((layer.n,), float("-inf"))
    columns = torch.zeros(layer.n, dtype=torch.int64, device=layer.device)
    for tile in layer.detached().tiles():
        values, indices = tile.logits.read(slice(0, tile.logits.n), None).max(1)
        # Tiles come in the order of their columns. NaN counts as larger than any number.
        is_larger = (values > largest[tile.rows]) | (values.isnan() & ~largest[tile.rows].isnan())
        largest[tile.rows] = values.where(is_larger, largest[tile.rows])
        columns[tile.rows] = (indices + tile.columns.start).where(is_larger, columns[tile.rows])
    return largest, columns


def _half_of_free_memory(device: torch.device) -> int:
    """Return half of the memory that is free on a GPU, but never more than at an earlier call.

    What torch's allocator has reserved and not allocated is free.
    """
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    _automatic[device] = min(free // 2, _automatic.get(device, free))
    return _automatic[device]


def add_product(total: Tensor, a: Tensor, b: Tensor, *, may_round: bool = False) -> None:
    """Add ``a @ b`` to ``total``, in the precision of ``total``, which may be higher than that of both.

    With ``may_round`` a product of bfloat16 matrices is rounded to bfloat16 where torch has no product with
    another dtype, as on a CPU. (A sum in float16 may be beyond its range.)
    """
    # torch's build for AMD's GPUs refuses to multiply 16-bit matrices with a float32 result.
    is_on_nvidia = a.device.type == "cuda" and torch.version.hip is None
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif is_on_nvidia and _TORCH >= (2, 10):
        # One product that adds: linkedin/Liger-Kernel#1239 measured 13.4 ms, and 23.5 with a sum of its own.
        # Before torch 2.10 the total must have the dtype of the matrices (pytorch/pytorch#167931).
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif is_on_nvidia and _TORCH >= (2, 8):
        for rows in ranges(len(a), max(_PRODUCT_BYTES // (b.shape[1] * total.element_size()), 1)):
            total[rows].add_(torch.mm(a[rows], b, out_dtype=total.dtype))
    elif may_round and a.dtype == torch.bfloat16:
        total += torch.mm(a, b)
    else:
        for part in ranges(len(b), _CONVERTED_COLUMNS):
            total.addmm_(a[:, part].to(total.dtype), b[part].to(total.dtype))
