"""What one rank cannot use becomes an error on all ranks, so that none waits for another."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

from ..errors import InvalidInputError

T = TypeVar("T")


def agreed(value: T, problem: str | None, group: dist.ProcessGroup | None) -> list[T]:
    """Return the values of all ranks of a group, in their order. One collective.

    Args:
        value: of this rank, picklable.
        problem: why this rank has no value, if it has none.
        group: ``None``: this rank is alone.

    Raises:
        InvalidInputError: some rank has a problem; on every rank, with the problem of the first that has one.
    """
    gathered = [(value, problem)]
    if group is not None:
        gathered *= dist.get_world_size(group)
        dist.all_gather_object(gathered, (value, problem), group=group)
    for _, found in gathered:
        if found is not None:
            raise InvalidInputError(found)
    return [value for value, _ in gathered]


def raise_everywhere(problem: str | None) -> None:
    """Raise :class:`InvalidInputError` on all ranks of the job if one of them has a problem."""
    agreed(None, problem, dist.group.WORLD if dist.is_initialized() else None)
