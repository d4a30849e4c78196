"""A student compared with its teachers, token by token, from the student's logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..logits.distributions import NO_ENTRY, Distribution, TopKDistribution
from ..logits.log_probs_at import vocab_parallel_log_probs_at
from .distillation_batch import DistillationBatch, DistillationOptions
from .divergences import of_buckets
from .full_distribution import FullDistribution
from .full_vocabulary import full_vocabulary_divergence
from .teachers import weighted


def comparison(
    rows: Tensor, index: Tensor, batch: DistillationBatch, options: DistillationOptions, how: dict[str, Any]
) -> Callable[[Tensor], Tensor]:
    """Return the function from logits ``[T, V / tp]`` to the divergence at ``n`` tokens.

    It returns ``[n, 1]`` for full distributions, and for a top-k what :func:`per_token` returns.

    Args:
        rows: ``[n]``, the tokens' rows of the logits.
        index: ``[n]``, the tokens' positions in the concatenation of all responses of the batch.
        how: ``tp_group``, ``temperature`` and ``inplace_backward``.
    """
    if batch.is_full:
        return _full_comparison(rows, index, batch, options, how)
    tokens = Tokens.of(batch, rows.device, index)

    def compare(logits: Tensor) -> Tensor:
        log_probs_nk, tail_n = vocab_parallel_log_probs_at(
            logits, tokens.indices, rows=rows, with_tail=True, **how
        )
        return per_token(log_probs_nk, tail_n, tokens, options)

    return compare


class Tokens(NamedTuple):
    """Teachers, old policy and mask at ``n`` response tokens of the microbatch."""

    teachers: list[TopKDistribution]
    old: TopKDistribution | None
    mask: Tensor

    @property
    def indices(self) -> Tensor:
        """The ids ``[n, k]`` at which the student is scored; -100, no id, in masked tokens."""
        return self.teachers[0].indices.masked_fill(~self.mask[:, None], NO_ENTRY)

    @classmethod
    def of(cls, batch: DistillationBatch, device: torch.device, index: Tensor | slice) -> Tokens:
        """Select tokens from the concatenation of all responses and put them on ``device``."""

        def selected(distributions: Sequence[Distribution]) -> TopKDistribution:
            topk = cast("Sequence[TopKDistribution]", distributions)
            return TopKDistribution.cat(topk).to(device)[index]

        teachers = [selected(teacher) for teacher in batch.teachers]
        old = None if batch.old is None else selected(batch.old)
        return cls(teachers, old, torch.cat(list(batch.loss_masks)).to(device)[index] != 0)


def per_token(log_probs_nk: Tensor, tail_n: Tensor, tokens: Tokens, options: DistillationOptions) -> Tensor:
    """Return divergence, student's tail probability and teachers' mean tail probability, ``[n, 3]``.

    ``log_probs_nk`` are the student's at ``tokens.indices``, ``tail_n`` those of all other ids together.
    """

    def masked(values: Tensor) -> Tensor:
        # Masked before anything is computed, since nan times zero is nan, in backward too.
        return torch.where(tokens.mask if values.dim() == 1 else tokens.mask[:, None], values, 0.0)

    def masked_distribution(distribution: TopKDistribution) -> TopKDistribution:
        log_probs, tail = masked(distribution.log_probs), masked(distribution.tail_log_prob)
        return TopKDistribution(distribution.indices, log_probs, tail)

    measure, old = options.measure, None
    if measure.needs_old and tokens.old is not None:
        old = masked_distribution(tokens.old)
    log_probs_nk, tail_n = masked(log_probs_nk), masked(tail_n)
    total = teacher_tail = torch.zeros_like(tail_n)
    for weight, teacher in weighted(list(map(masked_distribution, tokens.teachers)), options.teacher_weights):
        total = total + weight * of_buckets(measure, log_probs_nk, tail_n, teacher, old)
        teacher_tail = teacher_tail + weight * teacher.tail_log_prob.exp()
    return torch.stack([total, masked(tail_n.detach().exp()), masked(teacher_tail)], 1)


def _full_comparison(
    rows: Tensor, index: Tensor, batch: DistillationBatch, options: DistillationOptions, how: dict[str, Any]
) -> Callable[[Tensor], Tensor]:
    """Return the function from logits ``[T, V / tp]`` to the divergence at ``n`` tokens, ``[n, 1]``.

    Samples of the same teachers are compared together. Masked tokens are not compared. Hidden states go to
    the device of the logits when the function is called. The arguments are those of :func:`.comparison`.
    """
    index, device = index.cpu(), rows.device
    counts = (torch.cat([mask.cpu() for mask in batch.loss_masks]) != 0)[index]
    old = FullDistribution.cat(cast("Sequence[FullDistribution]", batch.old)) if batch.old else None
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
                divergence=options.divergence,
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
