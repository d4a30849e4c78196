"""Token ids of rows, and what is read and written in the columns that they have in a block."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .rows import Tile


class Ids(NamedTuple):
    """Token ids ``[n, K]``, negative for none; ``start`` is the id of the first column here."""

    indices: Tensor
    start: int

    def in_tile(self, tile: Tile) -> Ids:
        return Ids(self.indices[tile.rows], self.start + tile.columns.start)

    def columns(self, block: slice, width: int) -> Columns:
        column = self.indices[block] - self.start
        is_local = (column >= 0) & (column < width)
        largest, place = torch.where(is_local, column, -1).max(1, keepdim=True)
        return Columns(is_local, torch.where(is_local, column, largest).clamp(min=0), largest >= 0, place)


class Columns(NamedTuple):
    """Local columns for the token ids of one block of rows.

    An id of another rank is given the column of a local id of the same row, so that reading and writing all
    ``K`` columns touches local ids only. A row without a local id is given column 0, which :meth:`put` leaves
    as it is.
    """

    is_local: Tensor  # [rows, K]
    column: Tensor  # [rows, K]
    any_local: Tensor  # [rows, 1]
    place: Tensor  # [rows, 1], of the local id whose column those of other ranks have

    def take(self, block: Tensor) -> Tensor:
        """Return the logits at the ids, 0 for those of other ranks."""
        return torch.where(self.is_local, block.gather(1, self.column), 0.0)

    def put(self, block: Tensor, value: Tensor | float) -> None:
        """Write one value, or one per local id; where an id is repeated, these must be the same."""
        if isinstance(value, Tensor):
            value = torch.where(self.is_local, value, value.gather(1, self.place))
        unchanged = block.gather(1, self.column)
        block.scatter_(1, self.column, torch.where(self.any_local, value, unchanged))


def repeated_or_none(indices: Tensor) -> Tensor:
    """Return a mask of the entries that must not be counted, bool ``[n, K]``.

    These are negative ids, and all but one occurrence of an id that its row contains several times.
    """
    ids, order = indices.sort(1)
    repeated = ids < 0
    repeated[:, 1:] |= ids[:, 1:] == ids[:, :-1]
    return torch.empty_like(repeated).scatter_(1, order, repeated)


def summed_by_id(indices: Tensor, values: Tensor) -> Tensor:
    """Return for each place ``[rows, K]`` the sum of the values of all places that have its id."""
    ids, order = indices.sort(1)
    number = torch.zeros_like(ids)  # of the id, among those that its row has
    number[:, 1:] = (ids[:, 1:] != ids[:, :-1]).cumsum(1)
    number = torch.empty_like(number).scatter_(1, order, number)
    return torch.zeros_like(values).scatter_add_(1, number, values).gather(1, number)
