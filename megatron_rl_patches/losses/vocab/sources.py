"""Where logits come from: a tensor that exists, or whatever names its own source of tiles.

The nested cuts of logits ``[T, V / tp]``, from the largest to the smallest::

    rows       the n of the T rows that a loss reads; an index names them
    tile       some of these rows, some columns   the part of the logits that exists at one time: a tensor is
                                                  one tile; an output layer computes one after the other
    block      some rows of a tile                what one call of a function computes, see reduction.py
    stretch    64 to 2,048 columns of a block     what is summed in float32, see softmax.py

    columns ─►
    ┌───────────────┬───────────────┬───────────┐
    │ tile          │ tile          │ tile      │   ranks have further columns
    │┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄│               │           │
    │ ▓▓▓ ░░░ ▓▓▓ ░ │ block of the first tile: four stretches
    ├───────────────┼───────────────┼───────────┤
    │ tile          │ tile          │ tile      │
    └───────────────┴───────────────┴───────────┘
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...common.text import listed
from ...errors import InvalidInputError
from . import arguments
from .arguments import DEFAULT, RowIndex, Rows, VocabParallelOptions

Inputs = tuple[Tensor | None, ...]
Place = slice | Tensor  # rows of a tensor: a range, or numbers
Runs = list[tuple[slice, Place]]  # ranges of rows that are read, each with its place
Tensors = dict[str, Any]  # by the names that errors use; some may be None


class Grid(NamedTuple):
    """How logits are cut into tiles."""

    rows: list[slice]  # consecutive ranges of the n rows
    columns: list[slice]
    share: int  # so many sources have tiles at a time, in the memory of one tile


@dataclass(eq=False)
class Tile:
    """The part of the logits that is in memory."""

    x: Tensor  # [any, columns], which autograd does not see
    rows: slice  # which of the n selected rows count
    columns: slice  # of this rank's V / tp
    runs: Runs  # the rows, each range with its place in x; at least one

    @cached_property
    def place(self) -> Place:
        """Which rows of ``x`` count."""
        _, places = zip(*self.runs, strict=True)
        return places[0] if len(places) == 1 else arguments.as_numbers(places, self.x.device)

    def at(self, column: Tensor) -> Tensor:
        """Return the logit of each row in its column."""
        if isinstance(self.place, slice):
            return self.x[self.place].gather(1, column[:, None]).squeeze(1)
        return self.x[self.place, column]

    def put(self, x: Tensor, column: Tensor, is_here: Tensor, values: Tensor | float) -> None:
        """Write a value into the column of each row of ``x`` that ``is_here``."""
        numbers: Any = self.place
        if isinstance(numbers, slice):
            numbers = torch.arange(numbers.start, numbers.stop, device=x.device)
        x[numbers, column] = torch.where(is_here, values, x[numbers, column])


def cut_runs(runs: Runs, rows: slice, step: int) -> Runs:
    """Return the parts of runs within ``rows``, of ``step`` rows or fewer; no rows are one empty part."""
    parts: Runs = []
    for run, place in runs:
        stop = min(run.stop, rows.stop)
        for start in range(max(run.start, rows.start), stop, step):
            part = slice(start, min(start + step, stop))
            first, last = part.start - run.start, part.stop - run.start
            if isinstance(place, slice):
                parts.append((part, slice(place.start + first, place.start + last)))
            else:
                parts.append((part, place[first:last]))
    return parts or [(rows, slice(0, 0))]


class Gradients(ABC):
    """The gradients of a source's inputs, which are summed up tile by tile."""

    @abstractmethod
    def out(self, tile: Tile) -> Tensor:
        """Return where the gradient of a tile is written, in the shape of ``tile.x``; perhaps ``tile.x``."""

    @abstractmethod
    def add(self, tile: Tile) -> None:
        """Take the gradient of a tile, which has been written."""

    @abstractmethod
    def totals(self) -> Inputs:
        """Return the gradients of the inputs; ``None`` for one that needs none."""


class Source(ABC):
    """``n`` selected rows of logits ``[T, V / tp]``, of which one tile is in memory at a time."""

    options: VocabParallelOptions  # their scale is that of these logits
    n: int
    width: int  # how many columns this rank has, V / tp
    first_id: int  # the token id of the first of them
    num_columns: int  # how many of them have a token id; those behind them pad the vocabulary
    scale: Tensor | None  # the options' scale as a scalar(), or None where it is 1
    dtype: torch.dtype  # of statistics and gradients: float64 for float64 logits, else float32
    device: torch.device  # where the logits are, or would be
    inputs: Inputs  # the tensors that have gradients
    copies_rows: bool  # whether a block of rows cannot be a view in the dtype of the computation
    computes_tiles: ClassVar[bool] = False  # whether a tile takes memory of its own

    def set_up(self, n: int, width: int, dtype: torch.dtype, *inputs: Tensor | None) -> None:
        """Set all attributes but the options, which are there; ``dtype`` is that of the logits."""
        assert inputs[0] is not None
        self.n, self.width, self.inputs, self.device = n, width, inputs, inputs[0].device
        options = self.options
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.copies_rows = dtype != self.dtype
        self.first_id, self.num_columns = options.tp_rank * width, width
        if options.vocab_size is not None:
            self.num_columns = min(max(options.vocab_size - self.first_id, 0), width)
        self.scale = None if options.scale == 1 else self.scalar(options.scale)

    @abstractmethod
    def tiles(self, grid: Grid, is_backward: bool = False) -> Iterator[Tile]:
        """Yield tiles, each valid until the next, -inf on a rank without ids; backward overwrites them."""

    @abstractmethod
    def gradients(self, needed: Sequence[bool]) -> Gradients:
        """Return what sums up the gradients of the inputs that need one."""

    @abstractmethod
    def saved(self) -> tuple[Tensors, Callable[..., Source]]:
        """Return the tensors that backward reads by name, inputs first, and what restores a source from them.

        That function holds none of the tensors, so that autograd alone decides how long they live.
        """

    def claim(self) -> StorageClaim:
        """Claim the storage that a backward in place overwrites, if there is one."""
        return StorageClaim(self.options.inplace_backward or self.options.others_overwrite)

    def shape_of_tiles(self, width: int, share: int) -> tuple[int, int]:
        """Return rows and columns of a tile that is computed; ``share`` tiles have the memory of one."""
        raise NotImplementedError

    def columns_of_ids(self, ids: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        """Return the place of each token id in a range of columns, and whether it is there."""
        first, width = self.first_id + columns.start, columns.stop - columns.start
        column = ids - first if first else ids
        is_here = column >= 0
        if self.options.tp_size > 1 or width < self.width:
            is_here &= column < width
        return column, is_here

    def without_keeping(self) -> Source:
        """Return the same rows for a pass whose tiles no backward will read."""
        return self

    def forward_derivative(self) -> Any:
        """Return what sums up the derivative of log-probabilities in forward, if backward needs no more."""
        return None

    def scalar(self, number: float) -> Tensor:
        """Return a number as a tensor without dimensions, in the dtype of the computation.

        A compiled function must not see it as a number: each value would be compiled in.
        """
        return torch.full((), number, dtype=self.dtype, device=self.device)


# --- logits that exist


def rows_of(logits: Tensor, rows: Rows, options: VocabParallelOptions, name: str = "logits") -> Source:
    """Return the rows of logits that a loss reads; reject logits and rows that do not fit.

    Logits that need not exist name their own source: an attribute ``loss_source(index, options)`` returns it.
    """
    arguments.check_logits(name, logits, options)
    index = arguments.valid_rows(rows, logits)
    own: Callable[..., Source] | None = getattr(logits, "loss_source", None)
    if own is not None:
        return own(index, options)
    check_not_overwritten(logits)
    return SelectedRows(logits, index, options)


def check_mask(keep_mask: Tensor, source: Source) -> None:
    """Reject a mask that is not bool ``[n, V / tp]``."""
    arguments.check_instance("keep_mask", keep_mask)
    arguments.check_one_device(keep_mask=keep_mask, logits=source)
    if keep_mask.dtype != torch.bool or keep_mask.shape != (source.n, source.width):
        raise InvalidInputError(
            f"keep_mask is {keep_mask.dtype} {list(keep_mask.shape)}, expected torch.bool "
            f"{[source.n, source.width]}: a line per selected row, a column per column of logits"
        )


def valid_ids(name: str, ids: Tensor, source: Source, *, several: bool = False) -> Tensor:
    """Return token ids ``[n]``, or ``several`` per row, ``[n, K]``, as int64; reject what does not fit."""
    arguments.check_instance(name, ids)
    shape, meaning = f"[{source.n}]: one token id for each selected row", "to ignore a row"
    fits = ids.shape == (source.n,)
    if several:
        shape, meaning = f"[{source.n}, K]: K token ids for each selected row, K at least 1", "for no entry"
        fits = ids.dim() == 2 and len(ids) == source.n and ids.shape[1] > 0
    if not fits or ids.dtype not in arguments.INTEGERS:
        raise InvalidInputError(f"{name} are {ids.dtype} {list(ids.shape)}, expected torch.int64 {shape}")
    arguments.check_one_device(**{name: ids, "logits": source})
    arguments.check_ids(name, ids, source.options.num_ids(source.width), source.options.ignore_index, meaning)
    return ids.long()


class SelectedRows(Source):
    """Distinct rows of logits ``[T, V / tp]`` that exist: a slice, several slices, or numbers."""

    def __init__(self, logits: Tensor, index: RowIndex, options: VocabParallelOptions = DEFAULT) -> None:
        self.logits, self.options, n = logits, options, 0
        self.index = (index,) if isinstance(index, slice) else index
        #: Ranges of the n rows, each with its place in the T.
        self._runs: Runs = []
        for place in (index,) if isinstance(index, Tensor) else self.index:
            first, n = n, n + (len(place) if isinstance(place, Tensor) else place.stop - place.start)
            self._runs.append((slice(first, n), place))
        self.set_up(n, logits.shape[1], logits.dtype, logits)
        self.copies_rows |= isinstance(index, Tensor)

    def tiles(self, grid: Grid, is_backward: bool = False) -> Iterator[Tile]:
        logits = self.logits.detach()
        for columns, rows in product(grid.columns, grid.rows):
            x = logits[:, columns] if self.num_columns else logits.new_full((len(logits), 1), float("-inf"))
            yield Tile(x, rows, columns, cut_runs(self._runs, rows, max(self.n, 1)))

    def gradients(self, needed: Sequence[bool]) -> Gradients:
        check_not_overwritten(self.logits)
        return _LogitGradients(self)

    def claim(self) -> StorageClaim:
        claim, logits = super().claim(), self.logits
        if self.options.inplace_backward and torch.is_grad_enabled() and logits.requires_grad:
            claim.reason = _reason_against(logits)
            if not claim.reason:
                setattr(logits.untyped_storage(), _CLAIM, weakref.ref(claim))
        return claim

    def saved(self) -> tuple[Tensors, Callable[..., SelectedRows]]:
        options = self.options
        numbers, slices = (self.index, ()) if isinstance(self.index, Tensor) else (None, self.index)

        def restore(logits: Tensor, numbers: Tensor | None) -> SelectedRows:
            return SelectedRows(logits, slices if numbers is None else numbers, options)

        return {"the logits": self.logits, "rows": numbers}, restore


class _LogitGradients(Gradients):
    """The gradient ``[T, V / tp]``, which is zero in rows and columns that nobody reads."""

    def __init__(self, rows: SelectedRows) -> None:
        self._rows, logits, index = rows, rows.logits.detach(), rows.index
        self._gradient, stop = logits if rows.options.inplace_backward else torch.empty_like(logits), 0
        if isinstance(index, Tensor) and index.device.type != "cpu":
            others = torch.ones(len(logits), dtype=torch.int8, device=logits.device).index_fill_(0, index, 0)
            # Sorting brings the other rows to the front. nonzero() would make the CPU wait for the GPU.
            unread = others.argsort(descending=True)[: len(logits) - rows.n]
            self._gradient.index_fill_(0, unread, 0.0)
            return
        if isinstance(index, Tensor):  # on a CPU index_fill_ takes twice as long
            numbers = index.sort().values
            index = tuple(map(slice, numbers.tolist(), (numbers + 1).tolist()))
        for run in (*index, slice(len(logits), None)):
            if stop < run.start:
                self._gradient[stop : run.start].zero_()
            stop = run.stop

    def out(self, tile: Tile) -> Tensor:
        return self._gradient[:, tile.columns]

    def add(self, tile: Tile) -> None:
        pass

    def totals(self) -> Inputs:
        rows = self._rows
        if rows.num_columns < rows.width:
            self._gradient[:, rows.num_columns :].zero_()
        if rows.options.inplace_backward:
            mark_overwritten(rows.logits)
        return (self._gradient,)


# --- who may overwrite logits that exist, and who reads them after that
#
# Autograd's version counters stop operations that saved the logits before they were overwritten, but none
# that reads them afterwards, such as a loss that is computed again in a second backward: it would take the
# gradient for logits. So the storage, which all their views share, says that it holds a gradient.

_CLAIM = "_loss_storage_claim"
_GRADIENT_VERSION = "_loss_gradient_version"
_LEAF, _PART, _CLAIMED = 1, 2, 3
_REASONS = {
    _LEAF: "inplace_backward would overwrite a leaf that requires grad: pass the output of an operation",
    _PART: "inplace_backward needs logits with a storage of their own, and these are a part of something "
    "larger: pass the whole (rows= selects)",
    _CLAIMED: "these logits were given to another inplace_backward: only one loss can have their storage; "
    "use vocab_parallel_log_probs_and_entropy for both",
}


@dataclass(eq=False)
class StorageClaim:
    """The right of a backward to overwrite the logits; it lives as long as the graph of the loss.

    Each rank decides by its own logits whether they can be overwritten. The reason of a rank that refuses
    travels with the collective of forward, so that no other rank waits for it; see :meth:`check`.
    """

    asked_for: bool  # whether some rank wants to overwrite its logits, which is known alike on all ranks
    reason: int = 0  # why the logits of this rank cannot be overwritten, one of _REASONS; 0: they can

    def check(self, gathered: Tensor) -> None:
        """Raise if the marker of any rank, in ``gathered`` ``[tp]``, names a reason.

        On a CPU this is on every rank alike. On a GPU only ranks that refuse raise; the kernels of the others
        stop with a device-side assertion, which their processes see at some later call of CUDA.
        """
        if gathered.device.type == "cuda" and not self.reason:
            # Reading the values would make the CPU wait for the GPU.
            torch._assert_async((gathered == 0).all(), "another rank refused inplace_backward")
        elif ranks := [rank for rank, reason in enumerate(gathered.tolist()) if reason]:
            where = f" (of ranks {listed(ranks)} of tp_group)" if len(gathered) > 1 else ""
            reason = _REASONS[self.reason or int(gathered[ranks[0]])]
            raise InvalidInputError(f"{reason}, or inplace_backward=False{where}")


def _reason_against(logits: Tensor) -> int:
    base = logits if logits._base is None else logits._base
    if base.is_leaf and base.requires_grad:
        return _LEAF
    storage, dimensions = logits.untyped_storage(), zip(logits.shape, logits.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in dimensions) or storage.nbytes() != logits.nbytes:
        return _PART
    earlier = getattr(storage, _CLAIM, None)
    # Activation checkpointing computes the same loss a second time, within backward.
    if earlier is not None and earlier() is not None and torch._C._current_graph_task_id() == -1:
        return _CLAIMED
    return 0


def mark_overwritten(logits: Tensor) -> None:
    """Record that the logits hold a gradient. The record is void once something writes to them again."""
    storage = logits.untyped_storage()
    setattr(storage, _CLAIM, None)
    setattr(storage, _GRADIENT_VERSION, logits._version)


def check_not_overwritten(logits: Tensor) -> None:
    """Raise where the logits hold a gradient, see :func:`mark_overwritten`."""
    version = getattr(logits.untyped_storage(), _GRADIENT_VERSION, None)
    if version is not None and not logits.is_inference() and version == logits._version:
        raise InvalidInputError(
            "these logits were overwritten with their gradient by an inplace_backward: compute what reads "
            "them before, run backward once, or use inplace_backward=False"
        )
