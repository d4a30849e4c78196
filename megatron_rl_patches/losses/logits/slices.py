"""Which rows of logits are selected: as slices, which are read without a copy, or as numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...common.devices import on_device

#: Slices with step 1, none empty, each behind the end of the one before it.
Runs = tuple[slice, ...]
#: Distinct rows: a slice with step 1 or several, which are read without a copy, or row numbers (int64).
RowIndex = slice | Runs | Tensor
#: The same as callers pass them.
Rows = Tensor | slice | Sequence[slice] | None
_SHORTEST_RUN = 16  # rows, on average: it takes longer to read shorter ones apart than to copy all


def as_one_slice(rows: Tensor, device: torch.device) -> slice | Tensor:
    """Return consecutive rows as a slice, and others as they are, on the device."""
    index = as_slices(rows)
    return index if isinstance(index, slice) else on_device(rows, device)


def as_slices(rows: Tensor) -> RowIndex:
    """Return slices for long runs of consecutive rows, which are then read without a copy.

    Rows on a GPU stay as they are: reading their values would make the CPU wait for the GPU.
    """
    if rows.device.type != "cpu":
        return rows
    if len(rows) == 0:
        return slice(0, 0)
    ends = (rows.diff() != 1).nonzero().flatten()
    starts, stops = rows[[0, *(ends + 1).tolist()]].tolist(), (rows[[*ends.tolist(), -1]] + 1).tolist()
    are_ordered = all(stop < start for stop, start in zip(stops, starts[1:], strict=False))
    if not are_ordered or len(starts) > 1 + len(rows) // _SHORTEST_RUN:
        return rows
    runs = tuple(map(slice, starts, stops))
    return runs[0] if len(runs) == 1 else runs
