"""The logits of an output layer as a source: a tile is one matrix product, which is read and forgotten.

Backward multiplies again, turns the tile into its gradient in place, and multiplies that once for the hidden
states and once for the weight. So memory is one tile, whatever the vocabulary is. Where they can, tiles have
all selected rows and few columns: the weight's gradient of a tile is then complete. Backward begins with
forward's last tile, which stays in memory unless other logits are read before, or together with these.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...common.devices import each_prefetched, on_device
from ...errors import InvalidInputError
from .arguments import DEFAULT, VocabParallelOptions, as_one_slice
from .reduction import STRETCH, TORCH, Block, Blocks, each_block, ranges
from .softmax import NO_SOFTMAX, block_gradient
from .sources import Gradients, Grid, Inputs, Source, Tensors, Tile

#: Hidden states ``[T, h]``, this rank's weight ``[V / tp, h]`` and bias ``[V / tp]``; see deferred_logits.
LayerInputs = tuple[Tensor, Tensor, Tensor | None]
Product = Callable[[Tensor], Tensor]
#: By which numbers logits have been divided, each with what holds it, perhaps a tensor.
Divisions = tuple[tuple[float, Tensor | float], ...]

_LARGE_TILE, _FEWEST_COLUMNS = 1 << 30, 1024
# Where torch has no float32 product of 16-bit matrices, so many of their columns are converted at a time.
_CONVERTED_COLUMNS = 512
# Where it has one, but does not add it to a float32 tensor, so large a part of it is computed at a time: that
# of few rows of logits would be as large as the weight.
_PRODUCT_BYTES = 128 << 20


class TileOptions(NamedTuple):
    """How the tiles of an output layer are computed; see :func:`.deferred_logits`."""

    tile_bytes: int | None = None
    keep_bytes: int = 0
    accumulating: Any = None  # the weight, if its gradient is added to its main_grad; None: autograd gets it
    logit_dtype: torch.dtype | None = None


def bytes_of_tile(size: int, device: str) -> int:
    """Return the memory of a tile by default, where all logits that a loss reads take ``size`` bytes."""
    # Larger tiles need fewer products, as backward begins with the last one. They take half of all logits at
    # most. There are two sizes, so that microbatches of many lengths leave no gaps in the memory.
    of_gpu = _LARGE_TILE if size >= 2 * _LARGE_TILE else _LARGE_TILE // 2
    return of_gpu if device == "cuda" else 64 << 20


def placeholder_of(weight: Any) -> Tensor | None:
    """Return a gradient for autograd in place of that in a weight's ``main_grad``; ``None`` without DDP."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    # DDP's hook requires a gradient, and ignores its values if this attribute is set. Where an embedding has
    # the same weight (zero_out_wgrad), autograd adds its gradient to zeros, and DDP adds that to main_grad.
    weight.grad_added_to_main_grad = True
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight.detach())


class StoredTiles(dict[tuple[int, int], Tensor]):
    """Tiles that wait for a backward, by their first row and column, in memory that may be larger."""

    #: Of the latest forward on each device: its tiles, and the place of the last one.
    latest: ClassVar[dict[torch.device, tuple[weakref.ref[StoredTiles], tuple[int, int]]]] = {}

    @classmethod
    def free_last(cls, device: torch.device, unless_of: StoredTiles | None = None) -> None:
        """Free the tile that the latest forward has left on the device."""
        reference, place = cls.latest.get(device, (None, (0, 0)))
        if reference and (latest := reference()) is not None and latest is not unless_of:
            latest.pop(place, None)


@dataclass(eq=False)
class OutputLayerRows(Source):
    """Rows of the logits ``hidden @ weight.T + bias`` of an output layer."""

    layer: LayerInputs
    index: slice | Tensor
    tiling: TileOptions
    options: VocabParallelOptions = DEFAULT
    keeps_tiles: bool = False  # whether tiles may be kept for a backward
    stored_tiles: StoredTiles = field(default_factory=StoredTiles)
    computes_tiles = True

    def __post_init__(self) -> None:
        self.hidden, self.weight, self.bias = self.layer
        index, self.logit_dtype = self.index, self.tiling.logit_dtype or self.hidden.dtype
        n = len(index) if isinstance(index, Tensor) else index.stop - index.start
        size = n * len(self.weight) * self.logit_dtype.itemsize
        self._tile_bytes = self.tiling.tile_bytes or bytes_of_tile(size, self.hidden.device.type)
        self.set_up(n, len(self.weight), self.logit_dtype, *self.layer)

    def tiles(self, grid: Grid, is_backward: bool = False) -> Iterator[Tile]:
        row_ranges, column_ranges, share = grid
        buffer_size = row_ranges[0].stop * max(columns.stop - columns.start for columns in column_ranges)
        if self.device.type == "cuda":  # one size whatever the rows, see bytes_of_tile
            size = self._tile_bytes // share // self.logit_dtype.itemsize
            buffer_size = max(buffer_size, min(size, self.n * self.width))
        # Backward can begin with forward's last tile if tiles have all rows, since any order will do then.
        # Sources that are compared go through their tiles together, from the first to the last.
        begins_with_last = share == len(row_ranges) == 1
        if is_backward and begins_with_last:
            column_ranges = column_ranges[::-1]
        bias = None if self.bias is None else on_device(self.bias.detach(), self.device)
        weights: Iterable[Tensor] = [self.weight.detach()[columns] for columns in column_ranges]
        if self.weight.device != self.device:
            weights = each_prefetched(list(weights), self.device)
        stored, buffer, new = self.stored_tiles, None, partial(self.hidden.new_empty, dtype=self.logit_dtype)
        StoredTiles.free_last(self.device, unless_of=stored)
        left = self.tiling.keep_bytes if self.keeps_tiles and not is_backward else 0
        for columns, part in zip(column_ranges, weights, strict=True):
            for rows in row_ranges:
                hidden, place = self.hidden_nh[rows], (rows.start, columns.start)
                size, memory = len(hidden) * len(part), stored.pop(place, None)
                is_computed = memory is not None
                if memory is not None:
                    buffer = memory if len(memory) >= buffer_size else buffer
                elif (left := left - max(size * self.logit_dtype.itemsize, 1)) >= 0:
                    memory = stored[place] = new(size)
                else:
                    memory = buffer = new(buffer_size) if buffer is None else buffer
                logits = memory[:size].view(len(hidden), len(part))
                if not self.num_columns:
                    logits.fill_(float("-inf"))
                elif not is_computed:
                    multiply(hidden, part.T, None if bias is None else bias[columns], logits)
                yield Tile(logits, rows, columns, [(rows, slice(0, len(hidden)))])
        if self.keeps_tiles and begins_with_last and not is_backward and buffer is not None:
            stored.free_last(self.device, unless_of=stored)
            stored[place], stored.latest[self.device] = buffer, (weakref.ref(stored), place)

    def gradients(self, needed: Sequence[bool]) -> Gradients:
        return _InputGradients(self, needed)

    def saved(self) -> tuple[Tensors, Callable[..., OutputLayerRows]]:
        numbers, rows = (self.index, slice(0)) if isinstance(self.index, Tensor) else (None, self.index)
        others = self.tiling, self.options, self.keeps_tiles, self.stored_tiles

        def restore(*saved: Any) -> OutputLayerRows:
            *inputs, numbers = saved
            return OutputLayerRows(tuple(inputs), rows if numbers is None else numbers, *others)

        names = "the hidden states", "the weight of the output layer", "its bias", "rows"
        return dict(zip(names, (*self.inputs, numbers), strict=True)), restore

    def shape_of_tiles(self, width: int, share: int) -> tuple[int, int]:
        elements = max(self._tile_bytes // share // self.logit_dtype.itemsize, 1)
        most_columns = max(elements // max(self.n, 1), min(elements, _FEWEST_COLUMNS))
        if self.weight.device != self.device:  # a tile's part of it is copied, and is no larger than a tile
            most_columns = max(min(most_columns, elements // self.weight.shape[1]), 1)
        if STRETCH <= most_columns < width:
            most_columns -= most_columns % STRETCH
        columns = -(-width // -(-width // most_columns))
        unit = STRETCH if columns > STRETCH else STRETCH // 8
        columns = min(-(-columns // unit) * unit if columns > unit else columns, width)
        return max(min(elements // columns, self.n), 1), columns

    def without_keeping(self) -> OutputLayerRows:
        return self.select(self.index, self.options)

    def forward_derivative(self) -> ForwardDerivative | None:
        is_frozen = not any(t is not None and t.requires_grad for t in (self.weight, self.bias))
        if is_frozen and self.keeps_tiles and self.hidden.requires_grad:
            return ForwardDerivative(self)
        return None

    def select(
        self, index: slice | Tensor, options: VocabParallelOptions, trained: bool = True, keeps: bool = False
    ) -> OutputLayerRows:
        """Return these rows of the ``T``, which may have gradients if they are trained."""
        layer: Any = tuple(t if t is None or trained else t.detach() for t in self.layer)
        return OutputLayerRows(layer, index, self.tiling, options, keeps)

    def gradients_of(self, gradient: Tensor, needed: Sequence[bool]) -> Inputs:
        """Return the gradients of the inputs from that of all logits ``[n, V / tp]``."""
        sums, rows = _InputGradients(self, needed), slice(0, self.n)
        sums.add(Tile(gradient, rows, slice(0, self.width), [(rows, rows)]))
        return sums.totals()

    @cached_property
    def hidden_nh(self) -> Tensor:
        """The hidden states of the selected rows, without a graph."""
        hidden = self.hidden.detach()
        return hidden[self.index] if isinstance(self.index, slice) else hidden.index_select(0, self.index)

    def spread(self, gradient_nh: Tensor) -> Tensor:
        """Return the gradient of all hidden states ``[T, h]`` from that of the selected rows."""
        gradient_nh = gradient_nh.to(self.hidden.dtype)
        if self.n == len(self.hidden) and isinstance(self.index, slice):
            return gradient_nh
        gradient_th = torch.zeros_like(self.hidden)
        if isinstance(self.index, Tensor):  # a row may be there several times
            return gradient_th.index_add_(0, self.index, gradient_nh)
        gradient_th[self.index] = gradient_nh
        return gradient_th


class _InputGradients(Gradients):
    """The gradients of hidden states, weight and bias, summed over tiles, which they have overwritten."""

    def __init__(self, layer: OutputLayerRows, needed: Sequence[bool]) -> None:
        self._layer, self._weight = layer, layer.weight.detach()
        needs_hidden, needs_weight, needs_bias = needed
        main, zeros = getattr(layer.tiling.accumulating, "main_grad", None), layer.hidden.new_zeros
        self._main = main if needs_weight else None
        self._of_hidden = zeros(layer.hidden_nh.shape, dtype=layer.dtype) if needs_hidden else None
        self._of_weight = torch.empty_like(self._weight) if needs_weight and self._main is None else None
        if self._of_weight is not None:
            self._of_weight[layer.num_columns :].zero_()
        self._of_columns = self._weight  # the weight's gradient of columns whose tiles are being added
        self._of_bias = zeros(layer.width, dtype=layer.dtype) if needs_bias else None

    def out(self, tile: Tile) -> Tensor:
        return tile.x

    def add(self, tile: Tile) -> None:
        """Add what a tile contributes, rounded to the weight's dtype."""
        if not self._layer.num_columns:
            return
        gradient, rows, columns, layer = tile.x, tile.rows, tile.columns, self._layer
        if self._of_bias is not None:
            self._of_bias[columns] += gradient.sum(0, dtype=self._of_bias.dtype)
        gradient, hidden = gradient.to(self._weight.dtype), layer.hidden_nh[rows]
        if self._of_hidden is not None:
            add_product(self._of_hidden[rows], gradient, self._weight[columns], may_round=True)
        if self._main is not None:
            add_product(self._main[columns], gradient.T, hidden)
        elif self._of_weight is not None and len(hidden) == layer.n:
            torch.mm(gradient.T, hidden, out=self._of_weight[columns])
        elif self._of_weight is not None:  # sums of several products are rounded once, at the end
            if rows.start == 0:
                self._of_columns = torch.zeros_like(self._weight[columns], dtype=layer.dtype)
            add_product(self._of_columns, gradient.T, hidden)
            if rows.stop == layer.n:
                self._of_weight[columns] = self._of_columns

    def totals(self) -> Inputs:
        layer = self._layer
        return (
            None if self._of_hidden is None else layer.spread(self._of_hidden),
            self._of_weight if self._main is None else placeholder_of(layer.tiling.accumulating),
            None if self._of_bias is None or layer.bias is None else self._of_bias.to(layer.bias.dtype),
        )


class OutputLayer:
    """The logits ``[..., V / tp]`` of an output layer, which deferred logits are rows of.

    Its ``source`` reads all of them in tiles, and ``numbers`` are those of its rows, int64 ``[T]``.
    """

    has_hooks = False  # whether a hook waits for their gradient
    has_losses = False  # whether a loss has been computed whose gradient does not pass through them
    # All of them [T, V / tp], once code has read them; nobody writes to it.
    materialized: Tensor | None = None

    def __init__(self, inputs: LayerInputs, tiling: TileOptions, shape: torch.Size, product: Product) -> None:
        n, self.shape, self._product = len(inputs[0]), shape, product
        self.numbers, self.lock = torch.arange(n), threading.RLock()
        counted = [t for t in inputs if t is not None and not t.is_inference()]
        self._versions = [(t, t._version, t.data_ptr()) for t in counted]
        self.source = OutputLayerRows(inputs, slice(0, n), tiling)

    @property
    def is_unchanged(self) -> bool:
        """Whether nobody has written to the tensors that the logits come from."""
        return all((t._version, t.data_ptr()) == (version, place) for t, version, place in self._versions)

    def values(self, rows: Tensor, dtype: torch.dtype, divisions: Divisions, own: bool = False) -> Tensor:
        """Return rows ``[n]``, converted and divided, in memory of their ``own`` or perhaps of all logits."""
        source = self.source
        is_inference = any(t.is_inference() for t in source.inputs if t is not None)
        # Values do not depend on the autograd and autocast modes of who reads them.
        autocast = torch.autocast(source.device.type, enabled=False)
        with self.lock, torch.inference_mode(is_inference), torch.no_grad(), autocast:
            if (logits := self.materialized) is None:
                if not self.is_unchanged:
                    raise InvalidInputError(
                        "the hidden states or the weight behind deferred logits were overwritten: compute "
                        "what needs the logits first, for instance before the optimizer's step"
                    )
                StoredTiles.free_last(source.device)
                hidden = source.hidden.view(*self.shape, source.hidden.shape[1])
                logits = self._product(hidden).detach().flatten(0, -2).contiguous()
            values = logits[as_one_slice(rows, source.device)].to(dtype)
            for _, operand in divisions:
                values = values / operand
            shares = values.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
            if own and shares and self.materialized is None and rows is self.numbers:
                return values
            self.materialized = logits
            return values.clone() if own and shares else values


class ForwardDerivative:
    """The derivative ``[n, h]`` of log-probabilities by the hidden states of an output layer that is frozen.

    Forward computes it, and backward only multiplies it; an entropy would need another product. A tile adds
    ``exp(z) @ weight`` without the target's column, with ``z`` relative to the largest logit so far.
    """

    def __init__(self, layer: OutputLayerRows) -> None:
        self._layer, self._weight = layer, layer.weight.detach()
        new = partial(self._weight.new_full, dtype=layer.dtype)
        self._max_logit = new((layer.n, 1), torch.finfo(layer.dtype).min)  # -inf counts as this, too
        self._one, self._exp = new((layer.n, 1), 1.0), new((layer.n, self._weight.shape[1]), 0.0)

    def add(self, tile: Tile, max_logit: Tensor, column: Tensor, is_target: Tensor) -> None:
        """Add a tile, which is overwritten; ``column`` is that of the target, where it ``is_target``."""
        layer, highest, total = self._layer, self._max_logit[tile.rows], self._exp[tile.rows]
        before = highest.clone()
        torch.maximum(before, max_logit.to(layer.dtype)[:, None], out=highest)
        total *= ((before - highest) / layer.options.scale).exp_()

        def write(block: Block) -> None:
            softmax = block.part(self._max_logit), block.part(self._one), None
            block.function(block.xs[0], block.out, softmax, NO_SOFTMAX, None, None, layer.scale, block.work)

        each_block(layer, [tile], block_gradient, write, Blocks(0), tile.x)
        tile.put(tile.x, column, is_target, 0.0)
        weight = self._weight[tile.columns]
        add_product(total, tile.x.to(weight.dtype), weight, may_round=True)

    def finish(
        self, column: Tensor, is_target: Tensor, max_logit: Tensor, weight: Tensor, at_target: Tensor
    ) -> Tensor:
        """Return this rank's part, from columns as for :meth:`add` and from numbers of all ranks."""
        dtype, shift = self._exp.dtype, self._max_logit[:, 0] - max_logit
        factor = (shift / self._layer.options.scale).exp() * weight
        of_target = self._weight[column].to(dtype) * at_target.masked_fill(~is_target, 0.0).to(dtype)[:, None]
        return of_target.addcmul_(self._exp, factor.to(dtype)[:, None])


# --- products


def product(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``hidden @ weight.T + bias``, ``[..., V / tp]``, in a dtype that may be a more precise one."""
    logits = hidden.new_empty((*hidden.shape[:-1], len(weight)), dtype=dtype)
    multiply(hidden.flatten(0, -2), weight.T, bias, logits.flatten(0, -2))
    return logits


def multiply(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write ``a @ b + bias`` into ``out``, in the precision of ``out``, which may be higher than theirs."""
    if a.dtype != out.dtype:
        out.zero_() if bias is None else out.copy_(bias.expand_as(out))
        add_product(out, a, b)
    elif bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor, *, may_round: bool = False) -> None:
    """Add ``a @ b`` to ``total``, in the precision of ``total``, which may be higher than that of both.

    With ``may_round`` a product of bfloat16 matrices is rounded to bfloat16 where torch has no product with
    another dtype, as on a CPU. (A sum in float16 may be beyond its range.)
    """
    # torch's build for AMD's GPUs refuses to multiply 16-bit matrices with a float32 result.
    is_on_nvidia = a.device.type == "cuda" and torch.version.hip is None
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif is_on_nvidia and TORCH >= (2, 10):
        # One product that adds: linkedin/Liger-Kernel#1239 measured 13.4 ms, and 23.5 with a sum of its own.
        # Before torch 2.10 the total must have the dtype of the matrices (pytorch/pytorch#167931).
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif is_on_nvidia and TORCH >= (2, 8):
        for rows in ranges(0, len(a), max(_PRODUCT_BYTES // (b.shape[1] * total.element_size()), 1)):
            total[rows].add_(torch.mm(a[rows], b, out_dtype=total.dtype))
    elif may_round and a.dtype == torch.bfloat16:
        total += torch.mm(a, b)
    else:
        for part in ranges(0, len(b), _CONVERTED_COLUMNS):
            total.addmm_(a[:, part].to(total.dtype), b[part].to(total.dtype))
