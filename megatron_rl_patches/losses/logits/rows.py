"""The rows of logits that a loss reads: of a tensor, or of whatever names its own source of tiles.

The nested cuts of logits ``[T, V / tp]``, from the largest to the smallest::

    rows       the n of the T rows that a loss reads; an index names them
    tile       some of these rows, some columns   the part of the logits that exists at one time: a tensor is
                                                  one tile; an output layer computes one after the other
    block      some rows of a tile                what one call of a function computes, see blocks.py
    stretch    some hundred columns of a block    what is summed in float32, see softmax.stretches()

    columns ─►
    ┌───────────────┬───────────────┬───────────┐
    │ tile          │ tile          │ tile      │   rows of the first grid line; ranks have further columns
    │┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄│               │           │
    │ ▓▓▓ ░░░ ▓▓▓ ░ │ block of the first tile: four stretches
    │┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄│               │           │
    ├───────────────┼───────────────┼───────────┤
    │ tile          │ tile          │ tile      │
    └───────────────┴───────────────┴───────────┘
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, product
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from .arguments import DEFAULT, VocabParallelOptions, check_logits, valid_rows
from .overwriting import StorageClaim, check_not_overwritten, claim_storage, mark_overwritten
from .slices import RowIndex, Rows, Runs

Inputs = tuple[Tensor | None, ...]
S = TypeVar("S", bound="LogitSource")
STRETCH = 256  # columns, on a CPU


class Grid(NamedTuple):
    """How logits are cut into tiles."""

    rows: list[slice]  # consecutive ranges of the n rows
    columns: list[slice]
    share: int  # so many sources have tiles at a time, in the memory of one tile


class Tile(NamedTuple):
    """Logits of some of the ``n`` selected rows, in some of this rank's columns."""

    logits: SelectedRows
    rows: slice  # of the n selected rows
    columns: slice  # of this rank's V / tp


#: Writes the gradient of a tile into a tensor of its shape, which may be the tile's logits themselves.
TileGradient = Callable[[Tile, Tensor], None]


class LogitSource(ABC):
    """``n`` selected rows of logits ``[T, V / tp]``, which are read in tiles.

    Attributes:
        options: how they are read; their scale is that of these logits.
        n: how many rows.
        width: how many columns this rank has, ``V / tp``.
        dtype: that of statistics and gradients: float64 for float64 logits, else float32.
        device: where the logits are, or would be.
        inputs: the tensors that have gradients.
        computes_tiles: whether a tile takes memory of its own.
    """

    options: VocabParallelOptions
    n: int
    width: int
    dtype: torch.dtype
    device: torch.device
    inputs: Inputs
    computes_tiles: ClassVar[bool] = False

    @property
    def num_columns(self) -> int:
        """How many of this rank's columns have a token id; those behind them pad the vocabulary."""
        if (size := self.options.vocab_size) is None:
            return self.width
        return min(max(size - self.options.tp_rank * self.width, 0), self.width)

    @abstractmethod
    def tiles(self, grid: Grid | None = None) -> Iterator[Tile]:
        """Yield tiles of all rows and of the columns of :func:`columns_of`, in the order of the columns.

        The logits of a tile are valid until the next one. On a rank without ids they are -inf.

        Args:
            grid: how to cut them; ``None``: as the source would.
        """

    @abstractmethod
    def gradients(self, compute: TileGradient, needed: Sequence[bool], grid: Grid | None = None) -> Inputs:
        """Return the gradients of the inputs; ``None`` for one that needs none."""

    @abstractmethod
    def saved(self: S) -> tuple[dict[str, Tensor | None], Callable[..., S]]:
        """Return the tensors that backward reads by name, and a function that restores the source from them.

        The inputs come first. The function holds none of these, so that autograd alone decides how long they
        live.
        """

    def claim(self) -> StorageClaim:
        """Claim the storage that a backward in place overwrites, if there is one."""
        return StorageClaim(self.options.inplace_backward or self.options.others_overwrite)

    def shape_of_tiles(self, width: int, share: int) -> tuple[int, int]:
        """Return how many rows and columns a tile has, where so many tiles take the memory of one."""
        return max(self.n, 1), width

    def without_keeping(self: S) -> S:
        """Return the same rows for a pass whose tiles no backward will read."""
        return self

    def forward_derivative(self) -> Any:
        """Return an object that sums up the derivative of log-probabilities while forward reads the tiles.

        Backward then need not read them again. ``None``: it has to.
        """
        return None

    def gradients_by_derivative(self, of_rows: Tensor) -> Inputs:
        """Return the gradients of the inputs from what :meth:`forward_derivative` has summed up, weighted."""
        raise NotImplementedError

    def reduce(
        self,
        of_tile: Callable[[Tile], Tensor],
        merge: Callable[[Sequence[Tensor]], Tensor],
        grid: Grid | None = None,
    ) -> Tensor:
        """Return statistics ``[m, n]`` of all columns from those of tiles, ``[m, rows]``.

        Args:
            of_tile: computes the statistics of a tile.
            merge: makes statistics of those of several parts of the columns; ranks are merged alike.
        """
        totals: dict[int, Tensor] = {}
        for tile in self.tiles(grid):
            values, earlier = of_tile(tile), totals.get(tile.rows.start)
            totals[tile.rows.start] = values if earlier is None else merge([earlier, values])
        return torch.cat(list(totals.values()), dim=1) if len(totals) > 1 else next(iter(totals.values()))


def rows_of(logits: Tensor, rows: Rows, options: VocabParallelOptions, name: str = "logits") -> LogitSource:
    """Return the rows of logits that a loss reads; reject logits and rows that do not fit.

    Logits that need not exist name their own source: an attribute ``loss_source(index, options)`` returns it.
    """
    check_logits(name, logits)
    options.num_ids(logits.shape[1])
    index = valid_rows(rows, logits)
    own: Callable[..., LogitSource] | None = getattr(logits, "loss_source", None)
    if own is not None:
        return own(index, options)
    check_not_overwritten(logits)
    return SelectedRows(logits, index, options)


class SelectedRows(LogitSource):
    """Distinct rows of logits that exist, read and written one block of rows at a time.

    Attributes:
        logits: ``[T, V / tp]``.
        index: which of the ``T`` rows.
        num_logits: how many logits are read in all, where these are one tile of several.
    """

    def __init__(
        self,
        logits: Tensor,
        index: RowIndex,
        options: VocabParallelOptions = DEFAULT,
        num_logits: int | None = None,
    ) -> None:
        self.logits, self.index, self.options = logits, index, options
        self.width, self.device, self.inputs = logits.shape[1], logits.device, (logits,)
        self.dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        self._runs: Runs = (
            () if isinstance(index, Tensor) else (index,) if isinstance(index, slice) else index
        )
        lengths = [len(index)] if isinstance(index, Tensor) else [run.stop - run.start for run in self._runs]
        #: How many of the rows come before each of the runs, or before the numbers.
        *self._starts, self.n = accumulate(lengths, initial=0)
        self.num_logits = self.n * self.width if num_logits is None else num_logits
        #: Whether a block is a view of the logits in the dtype of the computation.
        self.can_be_viewed = not isinstance(index, Tensor) and logits.dtype == self.dtype

    # --- as a source

    def tiles(self, grid: Grid | None = None) -> Iterator[Tile]:
        logits, whole = self.logits.detach(), Grid([slice(0, self.n)], columns_of(self, self.width), 1)
        for columns, rows in product((grid or whole).columns, (grid or whole).rows):
            x, size = logits[:, columns], self.num_logits
            if not self.num_columns:
                x, size = logits.new_full((len(logits), 1), float("-inf")), 0
            index = self._place(rows) if grid else self.index
            yield Tile(SelectedRows(x, index, self.options, size), rows, columns)

    def gradients(self, compute: TileGradient, needed: Sequence[bool], grid: Grid | None = None) -> Inputs:
        check_not_overwritten(self.logits)
        gradient = self._new_gradient(self.options.inplace_backward)
        for tile in self.tiles(grid):
            compute(tile, gradient[:, tile.columns])
        if self.num_columns < self.width:
            gradient[:, self.num_columns :].zero_()
        if self.options.inplace_backward:
            mark_overwritten(self.logits)
        return (gradient,)

    def claim(self) -> StorageClaim:
        return claim_storage(self.logits, super().claim(), self.options.inplace_backward)

    def saved(self) -> tuple[dict[str, Tensor | None], Callable[..., SelectedRows]]:
        options = self.options
        numbers, slices = (self.index, ()) if isinstance(self.index, Tensor) else (None, self.index)

        def restore(logits: Tensor, numbers: Tensor | None) -> SelectedRows:
            return SelectedRows(logits, slices if numbers is None else numbers, options)

        return {"the logits": self.logits, "rows": numbers}, restore

    def _new_gradient(self, in_place: bool) -> Tensor:
        """Return a tensor like the logits, or the logits themselves, with zeros in all other rows."""
        logits = self.logits.detach()
        if not isinstance(self.index, Tensor):
            gradient = logits if in_place else torch.empty_like(logits)
            stop = 0
            for run in (*self._runs, slice(len(logits), None)):
                gradient[stop : run.start].zero_()
                stop = run.stop
            return gradient
        if not in_place:
            return torch.zeros_like(logits)
        others = torch.ones(len(logits), dtype=torch.int8, device=logits.device).index_fill_(0, self.index, 0)
        # Sorting brings the other rows to the front. nonzero() would make the CPU wait for the GPU.
        return logits.index_fill_(0, others.argsort(descending=True)[: len(logits) - self.n], 0.0)

    # --- which rows

    def cut(self, step: int, start: int = 0) -> list[tuple[slice, slice | Tensor]]:
        """Cut the ``n`` rows, from one on, into parts of so many; each comes with its place in the ``T``."""
        of_runs = zip(self._starts, [*self._starts[1:], self.n], strict=True)
        parts = [rows for first, stop in of_runs for rows in ranges(max(first, start), stop, step)]
        return [(rows, self._place(rows)) for rows in parts]

    def _place(self, rows: slice) -> slice | Tensor:
        """Return which of the ``T`` rows some of the ``n`` are."""
        if isinstance(self.index, Tensor):
            return self.index[rows]
        number = bisect(self._starts, rows.start) - 1
        run, start = self._runs[number], self._starts[number]
        place = slice(rows.start - start + run.start, rows.stop - start + run.start)
        return place if place.stop <= run.stop else self.numbers()[rows]

    def numbers(self) -> Tensor:
        """Return which of the ``T`` rows the ``n`` are, int64."""
        if isinstance(self.index, Tensor):
            return self.index
        return torch.cat([torch.arange(run.start, run.stop, device=self.device) for run in self._runs])

    def at(self, columns: Tensor) -> Tensor:
        """Return the logit of each row in its column, float64; a negative column stands for the first."""
        return self.logits.detach()[self.numbers(), columns.clamp(min=0)].double()

    def read_all(self) -> Tensor:
        """Return the logits of all rows, ``[n, V / tp]``."""
        return self.logits[self._place(slice(0, self.n))]

    def temperature(self) -> Tensor | None:
        """Return what the logits are divided by as a :meth:`scalar`, or ``None`` where it is 1."""
        return None if self.options.scale == 1 else self.scalar(self.options.scale)

    def scalar(self, number: float) -> Tensor:
        """Return a number as a tensor without dimensions, in the dtype of the computation.

        A compiled function must not see it as a number: each value would be compiled in.
        """
        return torch.full((), number, dtype=self.dtype, device=self.device)


def grid_of(sources: Sequence[LogitSource]) -> Grid:
    """Cut the rows and columns of sources such that the tiles of all take the memory of one tile."""
    width = max(sources[0].num_columns, 1)
    cut = [source for source in sources if source.computes_tiles]
    shapes = [source.shape_of_tiles(width, len(sources)) for source in cut or sources]
    rows, columns = (min(sizes) for sizes in zip(*shapes, strict=True))
    row_ranges = ranges(0, sources[0].n, rows) or [slice(0, 0)]
    return Grid(row_ranges, columns_of(sources[0], columns), len(sources))


def columns_of(source: LogitSource, step: int) -> list[slice]:
    """Cut the columns that have a token id into ranges of so many; one column, if this rank has no id.

    Where padding follows, what exceeds a multiple of a stretch is a range of its own, and all others can be
    cut into stretches. It comes first where tiles are computed, since backward begins with the last tile.
    """
    count = source.num_columns
    rest = count % best_stretch(source.device) if count < source.width else 0
    end = rest if source.computes_tiles else count - rest
    return [*ranges(0, end, step), *ranges(end, count, step)] or [slice(0, 1)]


def best_stretch(device: torch.device) -> int:
    """Return how many columns a stretch has where the number of columns is a multiple of that."""
    return 1024 if device.type == "cuda" else STRETCH


def ranges(start: int, stop: int, step: int) -> list[slice]:
    """Cut a range into parts of so many numbers; the last one may be shorter."""
    return [slice(number, min(number + step, stop)) for number in range(start, stop, step)]
