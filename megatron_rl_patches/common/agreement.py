"""What one rank cannot use becomes an error on all ranks, so that none waits for another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import InvalidInputError, MegatronRLPatchesError
from .text import one_line

T = TypeVar("T")
Group = dist.ProcessGroup | None


def world() -> Group:
    """Return the group of all ranks of the job; ``None``: this rank is alone."""
    return dist.group.WORLD if dist.is_initialized() else None


def gathered(value: T, group: Group) -> list[T]:
    """Return the values of all ranks of a group, in their order; of this rank without one. One collective."""
    values = [value]
    if group is not None and dist.get_world_size(group) > 1:
        values *= dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
    return values


def raise_on_all(
    problem: str | None, groups: Iterable[Group] | None = None, data: Any = None, alike: Sequence[Group] = ()
) -> None:
    """Raise a problem of any rank on all ranks of the groups, with one collective in each group.

    Without ``groups`` these are all ranks of the job. In the groups ``alike``, whatever two ranks have under
    one name in ``data`` must be the same. What a rank without a problem raises names the rank that has one.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    known = problem and f"rank {rank}: {problem}"
    for group in [world()] if groups is None else groups:
        own = rank, data if group in alike else None
        problems, ranks = zip(*gathered((known, own), group), strict=True)  # also if a problem is known
        known = known or next(filter(None, problems), None) or _difference(ranks)
    if known:
        raise InvalidInputError(problem or known)


def _difference(ranks: Iterable[tuple[int, Any]]) -> str | None:
    first: dict[str, tuple[int, Any]] = {}
    for rank, data in ranks:
        for name, value in (data or {}).items():
            other, expected = first.setdefault(name, (rank, value))
            if value != expected:
                return f"ranks {other} and {rank} differ in {name}, {expected} and {value}: pass the same"
    return None


def agreed(value: T, problem: str | None, group: Group) -> list[T]:
    """Return what :func:`gathered` does; all raise the first problem that a rank has in place of a value."""
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
