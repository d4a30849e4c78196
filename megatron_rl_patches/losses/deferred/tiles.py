"""The tiles of an output layer's logits, and the gradients of hidden states and weight from those of tiles.

A tile of logits is one matrix product of the selected hidden states with some rows of the weight. Forward
reads it and forgets it; backward multiplies again, turns the tile into its gradient in place, and multiplies
that once for the hidden states and once for the weight. So memory is one tile, whatever the vocabulary is.
Where tiles have all rows, and no other source is read together with this one, forward's last tile stays in
memory until other logits are read, or until backward, which begins with it and need not compute it again.

Tiles have all selected rows and few columns where they can: the weight's gradient of a tile is then complete,
and the sum over tiles, which the gradient of the hidden states is, has few terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...common.devices import each_prefetched, on_device
from ..logits.arguments import DEFAULT, VocabParallelOptions
from ..logits.rows import Grid, Inputs, LogitSource, SelectedRows, Tile, TileGradient, best_stretch, grid_of
from ..logits.softmax import NO_SOFTMAX, RowGradients, exp_floor, finite, write_gradient
from .options import StoredTiles, TileOptions
from .products import add_product, multiply

_MIB = 1 << 20
_LARGE_TILE = 1 << 30
_FEWEST_COLUMNS = 1024


@dataclass(eq=False)
class OutputLayerRows(LogitSource):
    """Rows of the logits ``hidden @ weight.T + bias`` of an output layer, which exist one tile at a time.

    Attributes:
        hidden: ``[T, h]``.
        weight: ``[V / tp, h]``, this rank's part; see :func:`.deferred_logits`, as for the bias ``[V / tp]``.
        keeps_tiles: whether tiles may be kept for a backward.
        stored_tiles: the tiles that wait for a backward.
        logit_dtype: the dtype of the logits.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    index: slice | Tensor
    tiling: TileOptions
    options: VocabParallelOptions = DEFAULT
    keeps_tiles: bool = False
    stored_tiles: StoredTiles = field(default_factory=StoredTiles)
    computes_tiles = True

    def __post_init__(self) -> None:
        index, self.device = self.index, self.hidden.device
        self.n = len(index) if isinstance(index, Tensor) else index.stop - index.start
        self.width, self.inputs = len(self.weight), (self.hidden, self.weight, self.bias)
        self.logit_dtype = self.tiling.logit_dtype or self.hidden.dtype
        self.dtype = torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    # --- as a source

    def tiles(self, grid: Grid | None = None) -> Iterator[Tile]:
        return self._tiles(self.selected_hidden(), grid)

    def _tiles(self, hidden_nh: Tensor, grid: Grid | None, is_backward: bool = False) -> Iterator[Tile]:
        row_ranges, column_ranges, share = grid or grid_of([self])
        buffer_size = row_ranges[0].stop * max(columns.stop - columns.start for columns in column_ranges)
        if self.device.type == "cuda":  # one size whatever the rows, see _tile_bytes
            size = self._tile_bytes() // share // self.logit_dtype.itemsize
            buffer_size = max(buffer_size, min(size, self.n * self.width))
        # Backward can begin with forward's last tile if tiles have all rows, since any order will do then.
        # Sources that are compared go through their tiles together, from the first to the last.
        begins_with_last = grid is None and len(row_ranges) == 1
        if is_backward and begins_with_last:
            column_ranges = column_ranges[::-1]
        memory = _TileMemory(self, buffer_size, may_keep=not is_backward)
        weight, bias = self.weight.detach(), self.bias
        bias = None if bias is None else on_device(bias.detach(), self.device)
        weights = each_prefetched([weight[columns] for columns in column_ranges], self.device)
        for columns, part in zip(column_ranges, weights, strict=True):
            for rows in row_ranges:
                hidden, place = hidden_nh[rows], (rows.start, columns.start)
                logits, is_computed = memory.of_tile(place, len(hidden), len(part))
                if not self.num_columns:
                    logits.fill_(float("-inf"))
                elif not is_computed:
                    multiply(hidden, part.T, None if bias is None else bias[columns], logits)
                selected = SelectedRows(logits, slice(0, len(hidden)), self.options, self.n * self.width)
                yield Tile(selected, rows, columns)
        if self.keeps_tiles and begins_with_last and not is_backward:
            memory.store_last(place)

    def gradients(self, compute: TileGradient, needed: Sequence[bool], grid: Grid | None = None) -> Inputs:
        hidden_nh = self.selected_hidden()
        sums = _Gradients(self, needed, hidden_nh)
        # Gradients take the place of the tiles' logits, so none is kept for another backward.
        for tile in self._tiles(hidden_nh, grid, is_backward=True):
            compute(tile, tile.logits.logits)
            if self.num_columns:
                sums.add(tile.rows, tile.columns, tile.logits.logits)
        if self.tiling.keep_bytes == "auto":
            self.tiling.backward_ran(self.device)
        return sums.totals()

    def saved(self) -> tuple[dict[str, Tensor | None], Callable[..., OutputLayerRows]]:
        tiling, options, keeps_tiles, tiles = self.tiling, self.options, self.keeps_tiles, self.stored_tiles
        numbers, rows = (self.index, slice(0)) if isinstance(self.index, Tensor) else (None, self.index)

        def restore(
            hidden: Tensor, weight: Tensor, bias: Tensor | None, numbers: Tensor | None
        ) -> OutputLayerRows:
            index = rows if numbers is None else numbers
            return OutputLayerRows(hidden, weight, bias, index, tiling, options, keeps_tiles, tiles)

        return {
            "the hidden states": self.hidden,
            "the weight of the output layer": self.weight,
            "its bias": self.bias,
            "rows": numbers,
        }, restore

    def shape_of_tiles(self, width: int, share: int) -> tuple[int, int]:
        elements = max(self._tile_bytes() // share // self.logit_dtype.itemsize, 1)
        most_columns = max(elements // max(self.n, 1), min(elements, _FEWEST_COLUMNS))
        if self.weight.device != self.device:  # a tile's part of it is copied, and is no larger than a tile
            most_columns = max(min(most_columns, elements // self.weight.shape[1]), 1)
        step = best_stretch(self.device)
        if step <= most_columns < width:
            most_columns -= most_columns % step
        columns = -(-width // -(-width // most_columns))
        columns = min(-(-columns // step) * step if columns > step else columns, width)
        return max(min(elements // columns, self.n), 1), columns

    def _tile_bytes(self) -> int:
        if self.tiling.tile_bytes is not None or self.device.type != "cuda":
            return self.tiling.tile_bytes or 64 * _MIB
        # Larger tiles need fewer products, as backward begins with the last one. They take half of all logits
        # at most. There are two sizes, so that microbatches of many lengths leave no gaps in the memory.
        large = self.n * self.width * self.logit_dtype.itemsize >= 2 * _LARGE_TILE
        return _LARGE_TILE if large else _LARGE_TILE // 2

    def without_keeping(self) -> OutputLayerRows:
        return replace(self, keeps_tiles=False, stored_tiles=StoredTiles())

    def forward_derivative(self) -> ForwardDerivative | None:
        """Return sums for a backward that needs the gradient of hidden states, and no other gradient."""
        is_frozen = not any(t is not None and t.requires_grad for t in (self.weight, self.bias))
        if not (is_frozen and self.keeps_tiles and self.hidden.requires_grad):
            return None
        return ForwardDerivative(self.weight.detach(), self.n, self.options.scale, self.dtype)

    def gradients_by_derivative(self, of_selected: Tensor) -> Inputs:
        return self.spread(of_selected), None, None

    # --- for deferred logits

    def select(
        self, index: slice | Tensor, options: VocabParallelOptions, *, trained: bool, keeps_tiles: bool
    ) -> OutputLayerRows:
        """Return these rows of the ``T``, which may have gradients if they are trained."""
        rows = self if trained else self.detached()
        return replace(
            rows, index=index, options=options, keeps_tiles=keeps_tiles, stored_tiles=StoredTiles()
        )

    def detached(self) -> OutputLayerRows:
        """Return the same rows without gradients for anything."""
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, hidden=self.hidden.detach(), weight=self.weight.detach(), bias=bias)

    def gradients_of(self, gradient: Tensor, needed: Sequence[bool]) -> Inputs:
        """Return the gradients of the inputs from that of all logits ``[n, V / tp]``."""
        sums = _Gradients(self, needed, self.selected_hidden())
        sums.add(slice(0, self.n), slice(0, self.width), gradient)
        return sums.totals()

    def selected_hidden(self) -> Tensor:
        """Return the hidden states of the selected rows, ``[n, h]``, without a graph."""
        hidden = self.hidden.detach()
        return hidden[self.index] if isinstance(self.index, slice) else hidden.index_select(0, self.index)

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


class _TileMemory:
    """The memory of one tile after the other: its own if it waits for a backward, or else a buffer."""

    def __init__(self, layer: OutputLayerRows, buffer_size: int, may_keep: bool) -> None:
        """Take how many logits the buffer has, and whether tiles may be kept."""
        self._layer, self._buffer_size, self._stored = layer, buffer_size, layer.stored_tiles
        self._buffer: Tensor | None = None
        keeps = may_keep and layer.keeps_tiles and layer.tiling.keep_bytes != 0
        StoredTiles.free_last(layer.device, unless_of=self._stored)  # before it is asked how much is free
        self._left = layer.tiling.bytes_to_keep(layer.device) if keeps else -1

    def of_tile(self, place: tuple[int, int], rows: int, columns: int) -> tuple[Tensor, bool]:
        """Return a tile ``[rows, columns]``, and whether its logits are there already."""
        size, memory = rows * columns, self._stored.pop(place, None)
        if memory is not None:
            if len(memory) >= self._buffer_size:
                self._buffer = memory
            return memory[:size].view(rows, columns), True
        self._left -= size * self._layer.logit_dtype.itemsize
        if self._left >= 0:
            memory = self._stored[place] = self._new(size)
        else:
            memory = self._buffer = self._new(self._buffer_size) if self._buffer is None else self._buffer
        return memory[:size].view(rows, columns), False

    def store_last(self, place: tuple[int, int]) -> None:
        """Let the tile that is in the buffer wait for a backward."""
        if self._buffer is not None:
            self._stored.store_last(place, self._buffer)

    def _new(self, size: int) -> Tensor:
        return self._layer.hidden.new_empty(size, dtype=self._layer.logit_dtype)


class _Gradients:
    """Sums the gradients of hidden states, weight and bias over tiles."""

    def __init__(self, layer: OutputLayerRows, needed: Sequence[bool], hidden_nh: Tensor) -> None:
        self._layer, self._weight, self._hidden_nh = layer, layer.weight.detach(), hidden_nh
        needs_hidden, needs_weight, needs_bias = needed
        main = layer.tiling.main_gradient
        zeros, dtype = self._hidden_nh.new_zeros, layer.dtype
        self._of_hidden = zeros(self._hidden_nh.shape, dtype=dtype) if needs_hidden else None
        self._main = main.buffer() if main is not None and needs_weight else None
        self._of_weight = torch.empty_like(self._weight) if needs_weight and self._main is None else None
        if self._of_weight is not None:
            self._of_weight[layer.num_columns :].zero_()
        self._of_columns: Tensor | None = None  # the weight's gradient of columns whose tiles are being added
        self._of_bias = zeros(layer.width, dtype=dtype) if needs_bias else None

    def add(self, rows: slice, columns: slice, gradient: Tensor) -> None:
        """Add what the gradient ``[rows, columns]`` of a tile contributes, rounded to the weight's dtype."""
        if self._of_bias is not None:
            self._of_bias[columns] += gradient.sum(0, dtype=self._of_bias.dtype)
        gradient = gradient.to(self._weight.dtype)
        if self._of_hidden is not None:
            add_product(self._of_hidden[rows], gradient, self._weight[columns], may_round=True)
        if self._main is not None:
            add_product(self._main[columns], gradient.T, self._hidden_nh[rows])
        elif self._of_weight is not None:
            self._add_to_weight(self._of_weight[columns], gradient.T, rows)

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


class ForwardDerivative:
    """The derivative of log-probabilities by the hidden states of an output layer that is frozen.

    The gradient of a row's hidden state is linear in the gradient of its log-probability. So forward, which
    has the logits at hand, computes the derivative ``[n, h]``, and backward only multiplies it::

        d log_prob / d hidden = sum over columns of d log_prob / dx * weight[column]

    A tile contributes ``exp(z) @ weight``, without the target's column, and with ``z`` relative to the
    largest logit so far. The sum is scaled when a tile with a larger one comes. An entropy would need a
    second such product, and gain nothing by it.
    """

    def __init__(self, weight: Tensor, n: int, temperature: float, dtype: torch.dtype) -> None:
        self._weight, self._temperature = weight, temperature
        self._max_logit = weight.new_full((n,), float("-inf"), dtype=torch.float64)
        self._exp = weight.new_zeros((n, weight.shape[1]), dtype=dtype)

    def add(self, tile: Tile, max_logit: Tensor, column: Tensor) -> None:
        """Add a tile, which is overwritten.

        Args:
            max_logit: the largest logit of each of its rows, float64.
            column: the target's column in the tile, -1 where it has none.
        """
        rows = tile.rows
        highest = torch.maximum(self._max_logit[rows], max_logit)
        reference = finite(highest.to(self._exp.dtype))
        shift = (self._max_logit[rows] - reference) / self._temperature
        shift.clamp_(min=exp_floor(torch.float64))  # it is -inf before the first tile
        self._max_logit[rows] = highest
        self._exp[rows] *= shift.exp().to(self._exp.dtype)[:, None]
        ones = torch.ones_like(reference)
        of_rows = RowGradients(
            (reference[:, None], ones[:, None], None), NO_SOFTMAX, torch.zeros_like(ones), ones.bool()
        )
        write_gradient(tile.logits, tile.logits.logits, of_rows, column, None)
        weights = tile.logits.logits.to(self._weight.dtype)
        add_product(self._exp[rows], weights, self._weight[tile.columns], may_round=True)

    def finish(self, local_target: Tensor, max_logit: Tensor, sum_exp: Tensor, log_prob: Tensor) -> Tensor:
        """Return this rank's part of d log_prob / d hidden, ``[n, h]``.

        Args:
            local_target: ``[n]``, a column of this rank or -1.
            max_logit: statistics over the whole vocabulary, as ``sum_exp`` and ``log_prob``, float64 ``[n]``.
        """
        temperature, dtype = self._temperature, self._exp.dtype
        scale = ((self._max_logit - max_logit) / temperature).exp() / (sum_exp * temperature)
        target_row = self._weight[local_target.clamp(min=0)].to(dtype)
        at_target = torch.where(local_target >= 0, -log_prob.expm1() / temperature, 0.0)
        return target_row * at_target.to(dtype)[:, None] - self._exp * scale.to(dtype)[:, None]
