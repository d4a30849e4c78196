"""Distillation of one or several teachers into the policy in training, on the responses that it sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
import torch.distributed
from torch import Tensor

from ..errors import InvalidInputError
from . import divergences
from .checkpointing import checkpointed
from .loss_func import LossFunc, checked_divisor
from .metrics import sums_and_counts
from .normalization import Normalization, check, token_weights
from .policy import check_lengths
from .teachers import check_same_indices, normalised
from .topk_distribution import NO_ENTRY, TopKDistribution

if TYPE_CHECKING:
    from .sequence_layout import SequenceLayout

Divergence = Literal[
    "reverse_kl", "forward_kl", "jensen_shannon", "generalised_kl", "importance_weighted_reverse_kl"
]


@dataclass(frozen=True)
class DistillationOptions:
    """Which distillation loss.

    Attributes:
        divergence: the function of this name in :mod:`.divergences`.
        beta: of ``"jensen_shannon"``.
        teacher_weights: of the divergences from several teachers; they are divided by their sum. ``None``:
            all the same.
        normalization: what the loss is an average over; see :func:`token_weights`.
        constant_length: the divisor of ``"constant"``.

    Raises:
        InvalidInputError: a value is out of its range, or two do not fit together.
    """

    divergence: Divergence = "reverse_kl"
    beta: float = 0.5
    teacher_weights: tuple[float, ...] | None = None
    normalization: Normalization = "token"
    constant_length: int | None = None

    def __post_init__(self) -> None:
        known = get_args(Divergence)
        if self.divergence not in known:
            raise InvalidInputError(f"divergence must be one of {known}, not {self.divergence!r}")
        divergences.check_beta(self.beta)
        if self.teacher_weights is not None:
            normalised(self.teacher_weights, len(self.teacher_weights))
        check(self.normalization, self.constant_length)


@dataclass(frozen=True, eq=False)
class DistillationBatch:
    """What a distillation loss needs to know of the responses of a microbatch besides the logits.

    Sequences with one entry per response; under context parallelism full responses, on every rank.

    Attributes:
        teachers: one such sequence per teacher whose divergences are averaged, most often a single one: of
            distributions ``[response_length, k]``, all of them at the same indices. A mixture
            (:func:`mix_teachers`) and each sample's own teacher (:func:`route_teachers`) are *one* teacher.
        loss_masks: ``[response_length]``, zero for tokens that do not count, such as those of tools; their
            distributions, ``nan`` included, are never looked at.
        old: distributions of the policy that sampled, as :func:`vocab_parallel_topk` gives them, at the same
            indices; for ``"importance_weighted_reverse_kl"``.

    Raises:
        InvalidInputError: the numbers of responses, their lengths, or indices differ.
    """

    teachers: Sequence[Sequence[TopKDistribution]]
    loss_masks: Sequence[Tensor]
    old: Sequence[TopKDistribution] | None = None

    def __post_init__(self) -> None:
        if not self.loss_masks or not self.teachers:
            raise InvalidInputError(
                f"{len(self.loss_masks)} responses and {len(self.teachers)} teachers were given; give at "
                "least one of each, and a response that is wholly masked where there is none"
            )
        if any(teacher is None for teacher in self.teachers):
            raise InvalidInputError(
                "a teacher is None, as forward_topk returns it off the last pipeline stage: make the batch "
                "in the loss function, which Megatron calls on the last stage only"
            )
        for number, teacher in enumerate(self.teachers):
            self._check(f"tail_log_probs of teacher {number}", teacher)
        if self.old is not None:
            self._check("tail_log_probs of old", self.old)
        for of_response in zip(*self.teachers, *([] if self.old is None else [self.old]), strict=True):
            check_same_indices(of_response)

    def _check(self, name: str, distributions: Sequence[TopKDistribution]) -> None:
        check_lengths(name, [d.tail_log_prob for d in distributions], self.response_lengths)

    @property
    def response_lengths(self) -> list[int]:
        return [len(mask) for mask in self.loss_masks]

    def check_for(self, options: DistillationOptions) -> None:
        """Raise :class:`InvalidInputError` unless everything is there that these options need."""
        if options.divergence == "importance_weighted_reverse_kl" and self.old is None:
            raise InvalidInputError(f"divergence is {options.divergence!r}: old is needed, and missing")
        normalised(options.teacher_weights, len(self.teachers))


class Tokens(NamedTuple):
    """What is compared with the student, of some response tokens of the microbatch, ``n`` each."""

    teachers: list[TopKDistribution]
    old: TopKDistribution | None
    mask: Tensor

    @property
    def indices(self) -> Tensor:
        """Where the student is looked at; nowhere in tokens that do not count."""
        return self.teachers[0].indices.masked_fill(~self.mask[:, None], NO_ENTRY)

    @classmethod
    def of(cls, batch: DistillationBatch, device: torch.device, index: Tensor | slice) -> Tokens:
        """Those that ``index`` selects of all responses end to end."""

        def selected(distributions: Sequence[TopKDistribution]) -> TopKDistribution:
            return TopKDistribution.cat(distributions).to(device)[index]

        return cls(
            [selected(teacher) for teacher in batch.teachers],
            None if batch.old is None else selected(batch.old),
            torch.cat(list(batch.loss_masks)).to(device)[index] != 0,
        )


def distillation_loss(
    log_probs: Sequence[Tensor],
    tail_log_probs: Sequence[Tensor],
    batch: DistillationBatch,
    options: DistillationOptions,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss of a microbatch as a sum, the count to divide it by, and metrics; as :func:`policy_loss`.

    Args:
        log_probs: of the student at the batch's indices, ``[response_length, k]`` per response.
        tail_log_probs: ``[response_length]`` per response.
        batch: teachers and masks of the same responses.
        options: which loss.

    Returns:
        ``(loss, num_tokens, metrics)``, as Megatron's schedules take it: a scalar with gradient; an int32
        scalar, of tokens or of responses as the normalization counts; and detached ``[sum, count]`` pairs of
        shape ``[2]``, for :func:`average_metrics`.

        Metrics: ``loss`` in its own normalization; per token ``divergence``, and the probability of the tail,
        which is what k leaves out, ``student_tail`` and ``teacher_tail``.

    Raises:
        InvalidInputError: lengths differ, or something that the options need is missing.
    """
    batch.check_for(options)
    lengths = batch.response_lengths
    check_lengths("tail_log_probs", tail_log_probs, lengths)
    check_lengths("log_probs", [one[..., 0] for one in log_probs], lengths)
    log_probs_nk, tail_n = torch.cat(list(log_probs)), torch.cat(list(tail_log_probs))
    values = per_token(log_probs_nk, tail_n, Tokens.of(batch, tail_n.device, slice(None)), options)
    return _summed(values, batch, options)


def make_distillation_loss_func(
    layout: SequenceLayout,
    batch: DistillationBatch,
    options: DistillationOptions | None = None,
    *,
    tp_group: torch.distributed.ProcessGroup | None = None,
    cp_group: torch.distributed.ProcessGroup | None = None,
    temperature: float = 1.0,
    inplace_backward: bool = False,
    recompute: bool = False,
    normalizer: float | None = None,
) -> LossFunc:
    """``loss_func(logits) -> (loss, num_tokens, metrics)`` of one microbatch, for a Megatron forward step.

    As :func:`make_loss_func`, whose arguments these are; the reverse KL by default. Under context parallelism
    each rank compares its own tokens, and three numbers of each are gathered.

    Raises:
        InvalidInputError: batch, layout and options do not fit together. Before any collective.
    """
    options = options or DistillationOptions()
    batch.check_for(options)
    divisor = checked_divisor(batch.response_lengths, layout, cp_group, normalizer)
    tokens = Tokens.of(batch, layout.response_rows.device, layout.response_index)

    def loss_func(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        from .packed import rows_of
        from .topk import vocab_parallel_log_probs_at

        log_probs_nk, tail_n = vocab_parallel_log_probs_at(
            rows_of(logits, layout),
            tokens.indices,
            tp_group=tp_group,
            rows=layout.response_rows,
            temperature=temperature,
            with_tail=True,
            inplace_backward=inplace_backward,
        )
        values = per_token(log_probs_nk, tail_n, tokens, options)
        full = torch.cat(layout.gather_responses(values, cp_group))
        loss, count, metrics = _summed(full, batch, options)
        return loss / divisor, count if normalizer is None else torch.ones_like(count), metrics

    return checkpointed(loss_func, enabled=recompute)


def per_token(log_probs_nk: Tensor, tail_n: Tensor, tokens: Tokens, options: DistillationOptions) -> Tensor:
    """Divergence, tail of the student and mean tail of the teachers, ``[n, 3]``; no gradient where masked."""
    mask = tokens.mask

    def kept(log_probs: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        # Before anything is computed: nan times zero is nan, also in backward.
        return torch.where(mask[:, None], log_probs, 0.0), torch.where(mask, tail, 0.0)

    def kept_of(distribution: TopKDistribution) -> TopKDistribution:
        parts = kept(distribution.log_probs, distribution.tail_log_prob)
        return TopKDistribution(distribution.indices, *parts)

    student = kept(log_probs_nk, tail_n)
    divergence = _divergence(options, None if tokens.old is None else kept_of(tokens.old))
    weights = normalised(options.teacher_weights, len(tokens.teachers))
    total = teacher_tail = torch.zeros_like(tail_n)
    for weight, teacher in zip(weights, map(kept_of, tokens.teachers), strict=True):
        total = total + weight * divergence(*student, teacher)
        teacher_tail = teacher_tail + weight * teacher.tail_log_prob.exp()
    tails = (torch.where(mask, tail, 0.0) for tail in (student[1].detach().exp(), teacher_tail))
    return torch.stack([total, *tails], 1)


def _divergence(options: DistillationOptions, old: TopKDistribution | None) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = getattr(divergences, options.divergence)
    if options.divergence == "jensen_shannon":
        return partial(function, beta=options.beta)
    if options.divergence == "importance_weighted_reverse_kl":
        return partial(function, old=old)
    return function


def _summed(
    values_n3: Tensor, batch: DistillationBatch, options: DistillationOptions
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    divergence_n, student_tail_n, teacher_tail_n = values_n3.unbind(1)
    masks = [mask.to(values_n3.device) for mask in batch.loss_masks]
    weights_n, count = token_weights(masks, options.normalization, options.constant_length, values_n3.dtype)
    counted = {"divergence": divergence_n, "student_tail": student_tail_n, "teacher_tail": teacher_tail_n}
    mask_n = weights_n > 0
    metrics = sums_and_counts({"loss": divergence_n}, weights_n, count)
    metrics |= sums_and_counts(counted, mask_n.to(values_n3.dtype), mask_n.sum())
    return (weights_n * divergence_n).sum(), count, metrics
