"""Which rows an operation on logits selects, for tensors that stand for rows of logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_MASKS = (torch.bool, torch.uint8)


def viewed_rows(
    func: Callable[..., Any], rows: Tensor, width: int, *args: Any, **kwargs: Any
) -> list[Tensor] | Tensor | None:
    """Return the rows, or a list of them, that a view of logits ``[..., width]`` has.

    The operation is applied to a matrix with the row's number in every column, which takes no memory.

    Args:
        rows: int64 numbers of rows, in the shape of the logits without their last dimension.

    Returns:
        ``None`` for a view that has parts of rows, or puts columns among rows.
    """
    try:
        result = func(rows.unsqueeze(-1).expand(*rows.shape, width), *args, **kwargs)
    except RuntimeError:
        return None
    parts = list(result) if isinstance(result, (list, tuple)) else [result]
    # The dimension of the columns has stride 0. It must still be the last one and complete.
    if any(part.dim() == 0 or part.shape[-1] != width for part in parts):
        return None
    if any(part.numel() > 0 and part.stride(-1) != 0 for part in parts):
        return None
    of_parts = [part[..., 0] for part in parts]
    return of_parts if isinstance(result, (list, tuple)) else of_parts[0]


def selects_rows(indices: Sequence[Tensor | None], dimensions: int) -> bool:
    """Return whether indexing leaves the last of so many dimensions complete."""
    # A mask indexes as many dimensions as it has, and any other index one.
    taken = [index.dim() if index is not None and index.dtype in _MASKS else 1 for index in indices]
    return sum(taken) < dimensions
