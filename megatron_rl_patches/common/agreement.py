"""What one rank cannot use becomes an error on all ranks, so that none waits for another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from ..errors import InvalidInputError, MegatronRLPatchesError
from .text import one_line

T = TypeVar("T")


def world() -> dist.ProcessGroup | None:
    """Return the group of all ranks of the job; ``None``: this rank is alone."""
    return dist.group.WORLD if dist.is_initialized() else None


def gathered(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return the values of all ranks of a group, in their order; of this rank without one. One collective."""
    values = [value]
    if group is not None and dist.get_world_size(group) > 1:
        values *= dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
    return values


def raise_on_all(problem: str | None, groups: Iterable[dist.ProcessGroup | None] | None = None) -> None:
    """Raise a problem of any rank on all ranks of the groups, with one collective in each group.

    Args:
        problem: of this rank, if it has one.
        groups: the ranks that would wait for this one; without them, all ranks of the job.

    Raises:
        InvalidInputError: some rank has a problem; one that has none names that rank.
    """
    known = problem and f"rank {dist.get_rank() if dist.is_initialized() else 0}: {problem}"
    for group in [world()] if groups is None else groups:
        of_group = gathered(known, group)  # also by a rank that knows a problem already
        known = known or next(filter(None, of_group), None)
    if known:
        raise InvalidInputError(problem or known)


def agreed(value: T, problem: str | None, group: dist.ProcessGroup | None) -> list[T]:
    """Return the values of all ranks of a group, in their order. One collective.

    Args:
        value: of this rank, picklable.
        problem: why this rank has no value, if it has none.
        group: ``None``: this rank is alone.

    Raises:
        InvalidInputError: some rank has a problem; on every rank, with the problem of the first that has one.
    """
    values, problems = zip(*gathered((value, problem), group), strict=True)
    if any(problems):
        raise InvalidInputError(next(filter(None, problems)))
    return list(values)


@contextmanager
def all_or_none(action: str, *, error: type[MegatronRLPatchesError], outcome: str) -> Iterator[None]:
    """Raise ``error`` on every rank of the job if the body fails on any, with the ranks and their reasons."""
    failure: Exception | None = None
    reason = None
    try:
        yield
    except Exception as raised:
        failure = raised
        reason = str(raised) if isinstance(raised, error) else one_line(raised)
    reasons = gathered(reason, world())
    if any(reasons):
        raise error(f"{action}: {summary(reasons)}. {outcome}") from failure


def summary(reasons: Sequence[str | None]) -> str:
    """Join the reasons of all ranks, each once, with the ranks that have it."""
    parts = []
    for reason in dict.fromkeys(filter(None, reasons)):
        ranks = [str(rank) for rank, other in enumerate(reasons) if other == reason]
        listed = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        parts.append(f"{'every rank' if len(ranks) == len(reasons) else listed}: {reason}")
    return "; ".join(parts)
