"""On-policy distillation: losses that draw the policy in training towards one or several teachers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

import torch
import torch.distributed
from torch import Tensor

from ...errors import InvalidInputError
from ..checkpointing import checkpointed
from ..logits.topk import vocab_parallel_log_probs_at
from ..megatron import LossFunc, checked_divisor
from ..sequences.layout import SequenceLayout
from ..sequences.responses import rows_of
from . import divergences
from .full_comparison import full_comparison
from .full_distribution import FullDistribution
from .policy import check_lengths
from .reduction import LossAndCount, Normalization, check_normalization, metrics_of, token_weights
from .teachers import check_one_kind, check_same_indices, normalize_weights, weighted
from .topk_distribution import NO_ENTRY, TopKDistribution

Divergence = Literal[
    "reverse_kl", "forward_kl", "jensen_shannon", "generalized_kl", "importance_weighted_reverse_kl"
]
#: What a teacher is known by: top-k and tail, or hidden states and output layer.
Distribution: TypeAlias = TopKDistribution | FullDistribution


@dataclass(frozen=True)
class DistillationOptions:
    """Options of :func:`distillation_loss`.

    Attributes:
        divergence: name of a function in :mod:`.divergences`.
        beta: parameter of the divergence ``"jensen_shannon"``.
        teacher_weights: weights of the divergences from several teachers; they are divided by their sum.
            ``None`` weights all teachers alike.
        normalization: what the loss is an average over; see :func:`token_weights`.
        constant_length: the divisor of the normalization ``"constant"``.
        num_ids: for full distributions, size of the vocabulary without padding; see
            :func:`.full_vocabulary_divergence`.
    """

    divergence: Divergence = "reverse_kl"
    beta: float = 0.5
    teacher_weights: tuple[float, ...] | None = None
    normalization: Normalization = "token"
    constant_length: int | None = None
    num_ids: int | None = None

    def __post_init__(self) -> None:
        known = get_args(Divergence)
        if self.divergence not in known:
            raise InvalidInputError(f"divergence must be one of {known}, not {self.divergence!r}")
        divergences.check_beta(self.beta)
        if self.teacher_weights is not None:
            normalize_weights(self.teacher_weights, len(self.teacher_weights))
        check_normalization(self.normalization, self.constant_length)


@dataclass(frozen=True, eq=False)
class DistillationBatch:
    """The data of a distillation loss, besides the logits, for the responses of one microbatch.

    The distributions are of ``response_length`` positions each: :class:`TopKDistribution`, of a response all
    at the same indices, or :class:`FullDistribution`. Otherwise :class:`InvalidInputError` is raised. Under
    context parallelism every rank has the full responses.

    Attributes:
        teachers: for each teacher, its distribution of each response. With several teachers the divergences
            are averaged; a mixture (:func:`mix_teachers`) or a teacher of its own for each sample
            (:func:`route_teachers`) counts as *one* teacher.
        loss_masks: one mask ``[response_length]`` per response, zero for tokens without loss, such as the
            output of tools. Distributions are ignored at these tokens and may hold ``nan`` there.
        old: distributions of the policy that sampled (:func:`vocab_parallel_topk`), one per response, which
            the divergence ``"importance_weighted_reverse_kl"`` needs.
    """

    teachers: Sequence[Sequence[Distribution]]
    loss_masks: Sequence[Tensor]
    old: Sequence[Distribution] | None = None

    def __post_init__(self) -> None:
        if not (self.loss_masks and self.teachers):
            raise InvalidInputError(
                f"{len(self.loss_masks)} responses and {len(self.teachers)} teachers were given; pass at "
                "least one of each, and a response that is wholly masked where there is none"
            )
        if None in self.teachers:
            raise InvalidInputError(
                "a teacher is None, as forward_topk returns it off the last pipeline stage: make the batch "
                "in the loss function, which Megatron calls on the last stage only"
            )
        scored = {f"teacher {number}": teacher for number, teacher in enumerate(self.teachers)}
        if self.old is not None:
            scored["old"] = self.old
        check_one_kind([one for distributions in scored.values() for one in distributions])
        for name, distributions in scored.items():
            values = [
                one.hidden[0] if isinstance(one, FullDistribution) else one.log_probs for one in distributions
            ]
            check_lengths(
                f"distributions of {name}", [value[:, 0] for value in values], self.response_lengths
            )
        if self.is_full:
            if any(len(one.heads) != 1 for one in self.old or () if isinstance(one, FullDistribution)):
                raise InvalidInputError(
                    "old is a mixture: pass the distributions of the one policy that sampled"
                )
        else:
            for of_response in zip(*scored.values(), strict=True):
                check_same_indices(of_response)

    @property
    def is_full(self) -> bool:
        """Whether the distributions are those over the whole vocabulary."""
        return isinstance(self.teachers[0][0], FullDistribution)

    @property
    def response_lengths(self) -> list[int]:
        """Number of tokens of each response, masked ones included."""
        return [len(mask) for mask in self.loss_masks]

    def check_for(self, options: DistillationOptions) -> None:
        """Raise :class:`InvalidInputError` if the options do not fit the teachers, or lack ``old``."""
        if options.divergence == "importance_weighted_reverse_kl" and self.old is None:
            raise InvalidInputError(f"divergence is {options.divergence!r}: old is needed, and missing")
        if self.is_full and options.divergence == "generalized_kl":
            raise InvalidInputError("divergence is 'generalized_kl', which is over k ids: use 'reverse_kl'")
        if not self.is_full and options.num_ids is not None:
            raise InvalidInputError("num_ids is for full distributions: a top-k names its ids")
        normalize_weights(options.teacher_weights, len(self.teachers))


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


def distillation_loss(
    log_probs: Sequence[Tensor],
    tail_log_probs: Sequence[Tensor],
    batch: DistillationBatch,
    options: DistillationOptions,
) -> LossAndCount:
    """Return the distillation loss of a microbatch as a sum, the count to divide it by, and metrics.

    Args:
        log_probs: the student's log-probs at the batch's indices, ``[response_length, k]`` per response.
        tail_log_probs: the student's log-probs of all other ids together, ``[response_length]`` per response.
        batch: teachers and masks of the same responses.
        options: which loss to compute.

    Returns:
        ``(loss, num_tokens, metrics)`` as :func:`policy_loss` does. The metrics are ``loss`` in its own
        normalization, and per token ``divergence`` (nats), ``student_tail`` and ``teacher_tail``, which are
        the probabilities of the tails.

    Raises:
        InvalidInputError: shapes differ from the batch's, or the options need something that is missing.
    """
    batch.check_for(options)
    if batch.is_full:
        raise InvalidInputError("the teachers are full distributions: use make_distillation_loss_func")
    lengths = batch.response_lengths
    check_lengths("tail_log_probs", tail_log_probs, lengths)
    check_lengths("log_probs", [log_probs_lk[..., 0] for log_probs_lk in log_probs], lengths)
    log_probs_nk, tail_n = torch.cat(list(log_probs)), torch.cat(list(tail_log_probs))
    tokens = Tokens.of(batch, tail_n.device, slice(None))
    return _summed(per_token(log_probs_nk, tail_n, tokens, options), batch, options)


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
    """Return the function ``logits -> (loss, num_tokens, metrics)`` that a Megatron forward step returns.

    The student is scored at the teachers' ids. Under context parallelism each rank compares its own tokens
    with the teachers', and three numbers per token are gathered over ``cp_group``, so that every rank
    computes the whole loss. Arguments and errors are those of :func:`make_loss_func`, except for:

    Args:
        layout: where the responses stand in the logits.
        batch: teachers and masks of the full responses.
        options: which loss to compute; the reverse KL by default.
        inplace_backward: with full distributions it has an effect where all tokens have the same teacher.
    """
    options = options or DistillationOptions()
    batch.check_for(options)
    divisor = checked_divisor(batch.response_lengths, layout, cp_group, normalizer)
    how = {"tp_group": tp_group, "temperature": temperature, "inplace_backward": inplace_backward}
    compare = comparison(layout.response_rows, layout.response_index, batch, options, how)

    def loss_func(logits: Tensor) -> LossAndCount:
        values = layout.gather_responses(compare(rows_of(logits, layout)), cp_group)
        loss, count, metrics = _summed(torch.cat(values), batch, options)
        return loss / divisor, count if normalizer is None else torch.ones_like(count), metrics

    return checkpointed(loss_func, enabled=recompute)


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
        return full_comparison(rows, index, batch, options, how)
    tokens = Tokens.of(batch, rows.device, index)

    def compare(logits: Tensor) -> Tensor:
        log_probs_nk, tail_n = vocab_parallel_log_probs_at(
            logits, tokens.indices, rows=rows, with_tail=True, **how
        )
        return per_token(log_probs_nk, tail_n, tokens, options)

    return compare


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

    keywords: dict[str, Any] = {}
    if options.divergence == "jensen_shannon":
        keywords["beta"] = options.beta
    elif options.divergence == "importance_weighted_reverse_kl" and tokens.old is not None:
        keywords["old"] = masked_distribution(tokens.old)
    divergence = getattr(divergences, options.divergence)
    log_probs_nk, tail_n = masked(log_probs_nk), masked(tail_n)
    total = teacher_tail = torch.zeros_like(tail_n)
    for weight, teacher in weighted(list(map(masked_distribution, tokens.teachers)), options.teacher_weights):
        total = total + weight * divergence(log_probs_nk, tail_n, teacher, **keywords)
        teacher_tail = teacher_tail + weight * teacher.tail_log_prob.exp()
    return torch.stack([total, masked(tail_n.detach().exp()), masked(teacher_tail)], 1)


def _summed(values_n3: Tensor, batch: DistillationBatch, options: DistillationOptions) -> LossAndCount:
    """Return loss, count and metrics from divergence, and perhaps tails, of the full responses."""
    divergence_n, *tails = values_n3.unbind(1)
    masks = [mask.to(values_n3.device) for mask in batch.loss_masks]
    weights_n, count = token_weights(masks, options.normalization, options.constant_length, values_n3.dtype)
    averages = {
        "divergence": divergence_n,
        **dict(zip(("student_tail", "teacher_tail"), tails, strict=False)),
    }
    metrics = metrics_of({"loss": divergence_n}, averages, weights_n, count)
    return (weights_n * divergence_n).sum(), count, metrics
