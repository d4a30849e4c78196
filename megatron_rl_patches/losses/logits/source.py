"""Where the logits of a loss come from: a tensor, or the output layer that would have made one.

The losses read logits as *tiles*, some rows and some columns at a time, and compute the gradient of each
tile. A tensor is one tile. Of an output layer each tile is a matrix product of its own, see :mod:`.head`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .inplace import StorageClaim, check_not_overwritten, claim_storage, mark_overwritten
from .rows import SelectedRows


class Tile(NamedTuple):
    """Logits of some of the ``n`` selected rows, in some of this rank's columns."""

    logits: SelectedRows
    rows: slice  # of the n selected rows
    columns: slice  # of this rank's V / tp


#: Computes the gradient ``[rows, columns]`` of a tile. If the bool is true, it overwrites the tile's logits.
TileGradient = Callable[[Tile, bool], Tensor]
Inputs = tuple[Tensor | None, ...]


class LogitSource(Protocol):
    """``n`` selected rows of logits ``[T, V / tp]``."""

    @property
    def n(self) -> int:
        """Number of selected rows."""

    @property
    def width(self) -> int:
        """Number of this rank's columns, ``V / tp``."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that statistics and gradients are computed in: float64 for float64, else float32."""

    @property
    def device(self) -> torch.device:
        """Where the logits are, or would be."""

    @property
    def inputs(self) -> Inputs:
        """The tensors that have gradients."""

    def tiles(self) -> Iterator[Tile]:
        """Yield tiles that cover all rows and columns; the logits of a tile are valid until the next one."""

    def part(self, rows: slice, columns: slice) -> Tensor:
        """Return logits of some of the selected rows and some columns, without a graph."""

    def select(
        self, index: slice | Tensor, block_bytes: int | None = None, inplace_backward: bool = False
    ) -> LogitSource:
        """Return these rows of the ``T``, in place of those that are selected now."""

    def detached(self) -> LogitSource:
        """Return the same rows without gradients for anything."""

    def gradients(self, compute: TileGradient, needed: Sequence[bool]) -> Inputs:
        """Return the gradients of the inputs; ``None`` for one that needs none."""

    def claim(self) -> StorageClaim:
        """Claim the storage that a backward in place overwrites, if there is one."""

    def saved(self) -> tuple[dict[str, Tensor | None], Callable[..., LogitSource]]:
        """Return the tensors that backward reads by name, and a function that restores the source from them.

        The function holds none of these, so that autograd alone decides how long they live.
        """


@dataclass(frozen=True, eq=False)
class DenseLogits:
    """Logits that exist; one tile."""

    rows: SelectedRows
    inplace_backward: bool

    @property
    def n(self) -> int:
        return self.rows.n

    @property
    def width(self) -> int:
        return self.rows.logits.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    @property
    def device(self) -> torch.device:
        return self.rows.logits.device

    @property
    def inputs(self) -> Inputs:
        return (self.rows.logits,)

    def tiles(self) -> Iterator[Tile]:
        detached = replace(self.rows, logits=self.rows.logits.detach())
        yield Tile(detached, slice(0, self.n), slice(0, self.width))

    def part(self, rows: slice, columns: slice) -> Tensor:
        return self.rows.read(rows, None)[:, columns].detach()

    def select(
        self, index: slice | Tensor, block_bytes: int | None = None, inplace_backward: bool = False
    ) -> DenseLogits:
        return DenseLogits(SelectedRows(self.rows.logits, index, block_bytes), inplace_backward)

    def detached(self) -> DenseLogits:
        return replace(self, rows=replace(self.rows, logits=self.rows.logits.detach()))

    def gradients(self, compute: TileGradient, needed: Sequence[bool]) -> Inputs:
        check_not_overwritten(self.rows.logits)
        (tile,) = self.tiles()
        gradient = compute(tile, self.inplace_backward)
        if self.inplace_backward:
            mark_overwritten(self.rows.logits)
        return (gradient,)

    def claim(self) -> StorageClaim:
        return claim_storage(self.rows.logits, self.inplace_backward)

    def saved(self) -> tuple[dict[str, Tensor | None], Callable[..., DenseLogits]]:
        index, block_bytes, in_place = self.rows.index, self.rows.block_bytes, self.inplace_backward
        fixed = index if isinstance(index, slice) else None

        def restore(logits: Tensor, row_numbers: Any) -> DenseLogits:
            rows = SelectedRows(logits, row_numbers if fixed is None else fixed, block_bytes)
            return DenseLogits(rows, in_place)

        row_numbers = index if isinstance(index, Tensor) else None
        return {"the logits": self.rows.logits, "rows": row_numbers}, restore
