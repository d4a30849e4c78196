"""A student compared with the full distributions of its teachers, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..logits.divergence import FullDivergence
from .full_distribution import FullDistribution
from .full_vocabulary import full_vocabulary_divergence
from .teachers import weighted

if TYPE_CHECKING:
    from .distillation import DistillationBatch, DistillationOptions


def full_comparison(
    rows: Tensor, index: Tensor, batch: DistillationBatch, options: DistillationOptions, how: dict[str, Any]
) -> Callable[[Tensor], Tensor]:
    """Return the function from logits ``[T, V / tp]`` to the divergence at ``n`` tokens, ``[n, 1]``.

    Samples of the same teachers are compared together. Masked tokens are not compared. Hidden states go to
    the device of the logits when the function is called. The arguments are those of :func:`.comparison`.
    """
    index, device = index.cpu(), rows.device
    counts = (torch.cat([mask.cpu() for mask in batch.loss_masks]) != 0)[index]
    needs_old = options.divergence == "importance_weighted_reverse_kl"
    old = FullDistribution.cat(cast("Sequence[FullDistribution]", batch.old)) if needs_old else None
    groups = [
        (weight, *group)
        for weight, teacher in weighted(batch.teachers, options.teacher_weights)
        for group in _groups(cast("Sequence[FullDistribution]", teacher), index, counts)
    ]
    if len(groups) > 1:
        # Each group reads the logits, and the first backward would overwrite what the others read.
        how = {**how, "inplace_backward": False}

    def compare(logits: Tensor) -> Tensor:
        total: Tensor | None = None
        for weight, places, positions, distribution in groups:
            teacher = distribution[positions].to(device)
            old_logits = None if old is None else old[index[places]].to(device).logits()[0]
            divergence_n = full_vocabulary_divergence(
                logits,
                teacher.logits(),
                divergence=cast("FullDivergence", options.divergence),
                beta=options.beta,
                teacher_weights=teacher.weights,
                old=old_logits,
                rows=rows[places.to(device)],
                num_ids=options.num_ids,
                **how,
            )
            if total is None:
                total = divergence_n.new_zeros(len(index))
            total = total.index_add(0, places.to(device), weight * divergence_n)
        assert total is not None
        return total[:, None]

    return compare


def _groups(
    distributions: Sequence[FullDistribution], index: Tensor, counts: Tensor
) -> list[tuple[Tensor, Tensor, FullDistribution]]:
    """Return for each teacher, or mixture, the tokens that it is compared at.

    Args:
        index: ``[n]``, position of each token of this rank in the concatenation of all responses.
        counts: bool ``[n]``, the tokens that count.

    Returns:
        The tokens, as numbers from 0 to ``n - 1``; their positions in the distribution; and the distribution
        of all samples of this teacher. At least one group, whose tokens may be none.
    """
    owner, position = [], []
    of_teacher: dict[tuple[object, ...], list[FullDistribution]] = {}
    for distribution in distributions:
        mine = of_teacher.setdefault(distribution.source, [])
        start = sum(map(len, mine))
        owner.append(torch.full((len(distribution),), list(of_teacher).index(distribution.source)))
        position.append(torch.arange(start, start + len(distribution)))
        mine.append(distribution)
    of_token, position_of_token = torch.cat(owner)[index], torch.cat(position)[index]
    groups = []
    for number, mine in enumerate(of_teacher.values()):
        places = (counts & (of_token == number)).nonzero().squeeze(1)
        groups.append((places, position_of_token[places], FullDistribution.cat(mine)))
    return [group for group in groups if len(group[0])] or groups[:1]
