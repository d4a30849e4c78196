"""One distribution to learn from where there are several teachers: their mixture, or each sample's own.

A third way is to average divergences: :class:`DistillationBatch` takes several teachers. All teachers share
the student's vocabulary, and score the *student's* ids, those of its top-k when it sampled: then mixture and
divergences are exact for the k ids and for the tail. A teacher's own top-k serves a student that learns from
this teacher alone, its log-probabilities being taken at the teacher's ids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from ..errors import InvalidInputError
from .topk_distribution import TopKDistribution

T = TypeVar("T")


def mix_teachers(
    teachers: Sequence[TopKDistribution], weights: Sequence[float] | None = None
) -> TopKDistribution:
    """The mixture ``sum of weight * probability``: the log-sum-exp of weighted log-probabilities.

    Args:
        teachers: of the same tokens at the same indices.
        weights: one per teacher, not negative; they are divided by their sum. ``None``: all the same.

    Raises:
        InvalidInputError: no teachers, weights that are none, or indices that differ.
    """
    check_same_indices(teachers)
    log_weights = [math.log(weight) if weight else -math.inf for weight in normalised(weights, len(teachers))]

    def mixed(log_probs: list[torch.Tensor]) -> torch.Tensor:
        weighted = [one.double() + log_weight for one, log_weight in zip(log_probs, log_weights, strict=True)]
        return torch.stack(weighted).logsumexp(0).to(log_probs[0].dtype)

    return TopKDistribution(
        teachers[0].indices,
        mixed([teacher.log_probs for teacher in teachers]),
        mixed([teacher.tail_log_prob for teacher in teachers]),
    )


def route_teachers(
    names: Sequence[str], values: Mapping[str, Sequence[T | None] | Mapping[int, T]]
) -> list[T]:
    """Of each sample, what the teacher that it names has for it: a distribution, log-probs, or anything else.

    Args:
        names: the teacher of each sample.
        values: by teacher, either one entry per sample, ``None`` for those that it did not score, or a
            mapping from the sample's position to its entry.

    Raises:
        InvalidInputError: a teacher is unknown, or has nothing for a sample that names it.
    """
    if unknown := sorted(set(names) - set(values)):
        raise InvalidInputError(f"samples name the teachers {unknown}, expected some of {sorted(values)}")
    by_position = {name: _by_position(of_teacher) for name, of_teacher in values.items()}
    for sample, name in enumerate(names):
        if sample not in by_position[name]:
            raise InvalidInputError(
                f"sample {sample} names the teacher {name!r}, which has nothing for it: score it with that"
            )
    return [by_position[name][sample] for sample, name in enumerate(names)]


def _by_position(values: Sequence[T | None] | Mapping[int, T]) -> Mapping[int, T]:
    if isinstance(values, Mapping):
        return values
    return {position: value for position, value in enumerate(values) if value is not None}


def normalised(weights: Sequence[float] | None, count: int) -> list[float]:
    """``count`` weights that add up to one."""
    weights = [1.0] * count if weights is None else list(weights)
    total = sum(weights)
    if len(weights) != count or not all(weight >= 0 for weight in weights) or not 0 < total < math.inf:
        raise InvalidInputError(
            f"weights are {weights} for {count} teacher(s), expected one each, not negative, not all zero"
        )
    return [weight / total for weight in weights]


def check_same_indices(distributions: Sequence[TopKDistribution]) -> None:
    if not distributions:
        raise InvalidInputError("there are no teachers; give at least one")
    first = distributions[0].indices
    for number, distribution in enumerate(distributions[1:], 1):
        indices = distribution.indices
        if indices is not first and not torch.equal(indices, first):
            raise InvalidInputError(
                f"distributions 0 and {number} have different indices ({list(first.shape)} and "
                f"{list(indices.shape)}): score every teacher at the same ids, those of the student's top-k, "
                "with TopKDistribution(ids, *vocab_parallel_log_probs_at(logits, ids, with_tail=True))"
            )
