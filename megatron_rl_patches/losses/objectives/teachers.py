"""Several teachers as one: a mixture of their distributions, or a teacher of its own for each sample.

All teachers must share the student's vocabulary and score the same ids, those of the *student's* top-k when
it sampled. Mixture and divergences are then exact for the k ids and for the tail.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ...errors import InvalidInputError
from ..vocab.arguments import is_number
from ..vocab.distributions import D, Distribution

T = TypeVar("T")


def mix_teachers(teachers: Sequence[D], weights: Sequence[float] | None = None) -> D:
    """Return the mixture ``sum of weight * probability`` of the teachers' distributions.

    Args:
        teachers: distributions of the same ``n`` positions, all :class:`TopKDistribution` at the same
            indices, or all :class:`FullDistribution`. A mixture of these keeps the hidden states of all.
        weights: one weight per teacher, not negative; they are divided by their sum. ``None`` weights all
            teachers alike.

    Raises:
        InvalidInputError: there are no teachers, they are of different kinds or temperatures, the weights are
            invalid, or the indices differ. An id that stands twice at a position is not refused here, since
            the mixture is right for each entry and a loss mask may leave the position out; the losses that
            read the mixture refuse it.
    """
    check_one_kind("teachers", teachers)
    weights = normalize_weights(weights, len(teachers))
    return type(teachers[0]).mixture(teachers, weights)


def route_teachers(
    names: Sequence[str], values: Mapping[str, Sequence[T | None] | Mapping[int, T]]
) -> list[T]:
    """Return, for each sample, the value of the teacher that the sample names.

    Args:
        names: name of the teacher of each sample.
        values: the teachers' values by name, distributions or anything else. A teacher has either one value
            per sample, ``None`` for samples that it did not score, or a mapping from the sample's position.
            :class:`InvalidInputError` is raised where a named teacher or its value is missing.
    """
    if names is None or not isinstance(values, Mapping):
        raise InvalidInputError("names are a list of names, and values a mapping from these names")
    if unknown := sorted(set(names) - set(values)):
        raise InvalidInputError(f"samples name the teachers {unknown}, expected some of {sorted(values)}")
    by_position = {
        name: scored if isinstance(scored, Mapping) else {i: x for i, x in enumerate(scored) if x is not None}
        for name, scored in values.items()
    }
    for sample, name in enumerate(names):
        if sample not in by_position[name]:
            raise InvalidInputError(
                f"sample {sample} names the teacher {name!r}, which has nothing for it: score it with that"
            )
    return [by_position[name][sample] for sample, name in enumerate(names)]


def weighted(teachers: Sequence[T], weights: Sequence[float] | None) -> list[tuple[float, T]]:
    """Return the teachers with their weights, which add up to one.

    A teacher of weight zero is left out: it may hold NaN, and zero times NaN is NaN.
    """
    pairs = zip(normalize_weights(weights, len(teachers)), teachers, strict=True)
    return [(weight, teacher) for weight, teacher in pairs if weight]


def normalize_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    """Return ``count`` weights that add up to one, the same for all if ``weights`` is ``None``."""
    if count == 0:
        raise InvalidInputError("there are no teachers; pass at least one")
    numbers = (1.0,) * count if weights is None else check_weights(weights)
    if len(numbers) != count:
        raise InvalidInputError(f"teacher_weights are {weights} for {count} teacher(s), expected one each")
    total = sum(numbers)
    return [weight / total for weight in numbers]


def check_weights(weights: Any) -> tuple[float, ...]:
    """Return the weights of a mixture, which may be an array or a tensor ``[teachers]``."""
    is_list = isinstance(weights, Sequence) or getattr(weights, "ndim", 0) == 1
    if is_list and len(weights) and all(map(is_number, weights)):
        numbers = tuple(map(float, weights))
        if min(numbers) >= 0 and 0 < sum(numbers) < math.inf:
            return numbers
    raise InvalidInputError(
        f"teacher_weights are {weights!r}, expected a list of numbers, one for each teacher, not negative, "
        "not all zero"
    )


def check_one_kind(name: str, distributions: Sequence[Distribution]) -> None:
    """Raise :class:`InvalidInputError` unless there are distributions, all of one kind."""
    kinds = {type(distribution) for distribution in distributions or ()}
    if len(kinds) != 1 or not all(issubclass(kind, Distribution) for kind in kinds):
        names = " and ".join(sorted(kind.__name__ for kind in kinds)) or "missing"
        raise InvalidInputError(
            f"the distributions of {name} are {names}; pass one kind, TopKDistribution or FullDistribution"
        )
