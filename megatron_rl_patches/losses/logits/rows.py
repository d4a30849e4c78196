"""The rows of logits that a loss reads: of a tensor, or of an output layer whose logits are not materialized.

The losses read logits as *tiles*, some rows and some columns at a time, and compute the gradient of each
tile. A tensor is one tile. Of an output layer each tile is a matrix product of its own, see :mod:`.tiles`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from .options import DEFAULT, VocabParallelOptions
from .overwriting import StorageClaim, check_not_overwritten, claim_storage, mark_overwritten
from .slices import RowIndex, Runs

_MIB = 1 << 20

Inputs = tuple[Tensor | None, ...]
S = TypeVar("S", bound="LogitSource")


class Tile(NamedTuple):
    """Logits of some of the ``n`` selected rows, in some of this rank's columns."""

    logits: SelectedRows
    rows: slice  # of the n selected rows
    columns: slice  # of this rank's V / tp


#: Computes the gradient ``[rows, columns]`` of a tile. If the bool is true, it overwrites the tile's logits.
TileGradient = Callable[[Tile, bool], Tensor]


class LogitSource(ABC):
    """``n`` selected rows of logits ``[T, V / tp]``; subclasses are dataclasses.

    Attributes:
        index: which of the ``T`` rows.
        options: how they are read; their scale is that of these logits.
        names: the tensors that have gradients: fields of the dataclass, and what errors call them.
    """

    index: RowIndex
    options: VocabParallelOptions
    names: ClassVar[dict[str, str]]

    @property
    def inputs(self) -> Inputs:
        """The tensors that have gradients."""
        return tuple(getattr(self, name) for name in self.names)

    @cached_property
    def n(self) -> int:
        """Number of selected rows."""
        return len(self.index) if isinstance(self.index, Tensor) else sum(map(_length, self.runs))

    @property
    def runs(self) -> Runs:
        """The rows as slices, if they are no row numbers."""
        assert not isinstance(self.index, Tensor)
        return (self.index,) if isinstance(self.index, slice) else self.index

    @property
    def is_frozen(self) -> bool:
        """Whether a backward needs the gradient of hidden states, and no other gradient."""
        return False

    @property
    @abstractmethod
    def width(self) -> int:
        """Number of this rank's columns, ``V / tp``."""

    @property
    def vocab_size(self) -> int:
        return self.width * self.options.tp_size

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype that statistics and gradients are computed in: float64 for float64, else float32."""
        first = self.inputs[0]
        return torch.float64 if first is not None and first.dtype == torch.float64 else torch.float32

    @property
    def device(self) -> torch.device:
        """Where the logits are, or would be."""
        first = self.inputs[0]
        assert first is not None
        return first.device

    @abstractmethod
    def tiles(self) -> Iterator[Tile]:
        """Yield tiles that cover all rows and columns, those of the same rows in the order of their columns.

        The logits of a tile are valid until the next one.
        """

    @abstractmethod
    def part(self, rows: slice, columns: slice) -> Tensor:
        """Return logits of some of the selected rows and some columns, without a graph."""

    @abstractmethod
    def gradients(self, compute: TileGradient, needed: Sequence[bool]) -> Inputs:
        """Return the gradients of the inputs; ``None`` for one that needs none."""

    def claim(self) -> StorageClaim:
        """Claim the storage that a backward in place overwrites, if there is one."""
        return StorageClaim(self.options.inplace_backward or self.options.others_overwrite)

    def select(self: S, index: RowIndex, options: VocabParallelOptions) -> S:
        """Return these rows of the ``T``, in place of those that are selected now."""
        return replace(self, index=index, options=options)  # type: ignore[type-var]

    def sharing(self: S, count: int) -> S:
        """Return the same rows with smaller tiles, of which so many take the memory of one."""
        return self

    def keeping_tiles(self: S, keeps: bool) -> S:
        """Return the same rows for a pass whose tiles a backward will read, or will not."""
        return self

    def detached(self: S) -> S:
        """Return the same rows without gradients for anything."""
        return self._with_inputs([None if tensor is None else tensor.detach() for tensor in self.inputs])

    def saved(self: S) -> tuple[dict[str, Tensor | None], Callable[..., S]]:
        """Return the tensors that backward reads by name, and a function that restores the source from them.

        The function holds none of these, so that autograd alone decides how long they live.
        """
        numbers = self.index if isinstance(self.index, Tensor) else None
        bare = self._with_inputs([None] * len(self.names), self.index if numbers is None else slice(0, 0))

        def restore(*tensors: Any) -> S:
            *inputs, numbers = tensors
            return bare._with_inputs(inputs, bare.index if numbers is None else numbers)

        return {**dict(zip(self.names.values(), self.inputs, strict=True)), "rows": numbers}, restore

    def _with_inputs(self: S, inputs: Sequence[Tensor | None], index: RowIndex | None = None) -> S:
        changes = dict(zip(self.names, inputs, strict=True))
        return replace(self, index=self.index if index is None else index, **changes)  # type: ignore[type-var]


def reduced(parts: Iterable[tuple[slice, Tensor]], merge: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
    """Return statistics ``[m, n]`` of whole rows from those of parts of their columns.

    Args:
        parts: rows and their statistics ``[m, rows]``, for each part; parts with the same rows come in the
            order of their columns.
        merge: makes statistics ``[m, rows]`` of those of two parts; ranks are merged alike.
    """
    totals: dict[int, Tensor] = {}
    for rows, values in parts:
        earlier = totals.get(rows.start)
        totals[rows.start] = values if earlier is None else merge([earlier, values])
    return torch.cat(list(totals.values()), dim=1) if len(totals) > 1 else next(iter(totals.values()))


@dataclass(frozen=True, eq=False)
class SelectedRows(LogitSource):
    """Distinct rows of logits that exist, read and written one block of rows at a time.

    Attributes:
        logits: ``[T, V / tp]``.
        num_logits: how many logits are read in all, where these are one tile of several.
    """

    logits: Tensor
    index: RowIndex
    options: VocabParallelOptions = DEFAULT
    num_logits: int | None = None
    names = {"logits": "the logits"}  # noqa: RUF012

    @property
    def width(self) -> int:
        return self.logits.shape[1]

    def tiles(self) -> Iterator[Tile]:
        yield Tile(self.detached(), slice(0, self.n), slice(0, self.width))

    def part(self, rows: slice, columns: slice) -> Tensor:
        return self.read(rows, None)[:, columns].detach()

    def gradients(self, compute: TileGradient, needed: Sequence[bool]) -> Inputs:
        check_not_overwritten(self.logits)
        (tile,) = self.tiles()
        gradient = compute(tile, self.options.inplace_backward)
        if self.options.inplace_backward:
            mark_overwritten(self.logits)
        return (gradient,)

    def claim(self) -> StorageClaim:
        return claim_storage(self.logits, super().claim(), self.options.inplace_backward)

    @cached_property
    def _starts(self) -> list[int]:
        """How many of the rows come before each of the runs."""
        *starts, _ = accumulate(map(_length, self.runs), initial=0)
        return starts

    @property
    def row_indices(self) -> Tensor:
        if isinstance(self.index, Tensor):
            return self.index
        return torch.cat([torch.arange(run.start, run.stop, device=self.device) for run in self.runs])

    @property
    def can_be_viewed(self) -> bool:
        """Whether a block of the rows is a view of the logits in the dtype of the computation."""
        return not isinstance(self.index, Tensor) and self.logits.dtype == self.dtype

    def blocks(self, buffers: int, width: int | None = None, scale: int = 1) -> list[slice]:
        """Cut the ``n`` rows into ranges, such that so many buffers of one range fit into ``block_bytes``.

        A buffer has ``width`` columns, by default those of the logits. ``scale`` multiplies the default of
        ``block_bytes``.
        """
        size = self.options.block_bytes or scale * _default_block_bytes(self.logits)
        row_bytes = max(width or self.width, 1) * self.dtype.itemsize * max(buffers, 1)
        step = max(1, size // row_bytes)
        if isinstance(self.index, Tensor):
            return ranges(self.n, step)
        of_runs = zip(self._starts, self.runs, strict=True)
        return [shifted(part, start) for start, run in of_runs for part in ranges(_length(run), step)]

    def scratch(self, blocks: list[slice], buffers: int) -> Tensor:
        """Return ``[buffers, rows of the largest block, V / tp]``, uninitialized."""
        rows = max(map(_length, blocks), default=0)
        return self.logits.new_empty((buffers, rows, self.width), dtype=self.dtype)

    def window(self, rows: slice, columns: slice) -> SelectedRows:
        """Return some of the ``n`` rows, and some of the columns."""
        return replace(self, logits=self.logits[:, columns], index=self._place(rows))

    def read(self, block: slice, buffer: Tensor | None) -> Tensor:
        """Return the logits of a block: a view of them, or ``buffer`` filled with them.

        With a buffer the result has the buffer's dtype, without one that of the logits.
        """
        logits, place = self.logits, self._place(block)
        if isinstance(place, slice):
            x = logits[place]
            return x if buffer is None or x.dtype == buffer.dtype else buffer.copy_(x)
        if buffer is None or logits.dtype != buffer.dtype:
            x = logits.index_select(0, place)
            return x if buffer is None else buffer.copy_(x)
        return torch.index_select(logits, 0, place, out=buffer)

    def new_gradient(self, in_place: bool) -> Tensor:
        """Return a tensor like the logits, or the logits themselves, with zeros in all other rows."""
        logits = self.logits
        if not isinstance(self.index, Tensor):
            gradient = logits if in_place else torch.empty_like(logits)
            stop = 0
            for run in (*self.runs, slice(len(logits), None)):
                gradient[stop : run.start].zero_()
                stop = run.stop
            return gradient
        if not in_place:
            return torch.zeros_like(logits)
        others = torch.ones(len(logits), dtype=torch.int8, device=logits.device).index_fill_(0, self.index, 0)
        # Sorting brings the other rows to the front. nonzero() would make the CPU wait for the GPU.
        return logits.index_fill_(0, others.argsort(descending=True)[: len(logits) - self.n], 0.0)

    def read_and_write_views(
        self, gradient: Tensor, block: slice, buffers: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of a block, and where to compute its gradient before :meth:`write`.

        With buffers the gradient is computed in the logits' own dtype or in the first buffer. In place, both
        are the same object, so that a compiler sees that they are one.
        """
        place = self._place(block)
        if isinstance(place, slice) and (self.can_be_viewed or buffers is None):
            x = self.logits[place]
            # Tensors without elements have the same address, whether they share memory or not.
            in_place = gradient.numel() > 0 and gradient.data_ptr() == self.logits.data_ptr()
            return x, x if in_place else gradient[place]
        x = self.read(block, None if buffers is None else buffers[0])
        return x, x

    def write(self, gradient: Tensor, block: slice, values: Tensor) -> None:
        """Put the gradient of a block where it belongs, unless it was computed there."""
        place = self._place(block)
        if isinstance(place, Tensor):
            gradient.index_copy_(0, place, values.to(gradient.dtype))
        elif (of_block := gradient[place]).data_ptr() != values.data_ptr():
            of_block.copy_(values)

    def _place(self, block: slice) -> slice | Tensor:
        """Return which of the ``T`` rows a block of the ``n`` is."""
        if isinstance(self.index, Tensor):
            return self.index[block]
        number = bisect(self._starts, block.start) - 1
        run = self.runs[number]
        place = shifted(block, run.start - self._starts[number])
        return place if place.stop <= run.stop else self.row_indices[block]

    def temperature(self) -> Tensor | None:
        """Return what the logits are divided by as a :meth:`scalar`, or ``None`` where it is 1."""
        return None if self.options.scale == 1 else self.scalar(self.options.scale)

    def scalar(self, number: float) -> Tensor:
        """Return a number as a tensor without dimensions, in the dtype of the computation.

        A compiled function must not see it as a number: each value would be compiled in.
        """
        return torch.full((), number, dtype=self.dtype, device=self.device)


def _length(part: slice) -> int:
    """Return how many rows a slice with bounds has."""
    return part.stop - part.start


def shifted(part: slice, start: int) -> slice:
    """Return a range that begins so much later."""
    return slice(part.start + start, part.stop + start)


def ranges(size: int, step: int) -> list[slice]:
    """Cut a range into parts of so many numbers; the last one may be shorter."""
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def _default_block_bytes(logits: Tensor) -> int:
    """Return the default of ``block_bytes``.

    On a CPU this is what stays in the cache, 2 MiB per thread, but at most 1% of the logits, and at least
    1 MiB. On a GPU it is what keeps the device busy: 64 MiB, or 1% of the logits if that is more.
    """
    one_percent = logits.numel() * logits.element_size() // 100
    if logits.device.type == "cpu":
        return max(min(2 * _MIB * torch.get_num_threads(), one_percent), _MIB)
    return max(64 * _MIB, one_percent)
