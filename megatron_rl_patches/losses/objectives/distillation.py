"""On-policy distillation: losses that draw the policy in training towards one or several teachers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ...common.devices import each_on_device, on_device
from ...errors import InvalidInputError
from ..vocab import arguments
from ..vocab.arguments import VocabParallelOptions
from ..vocab.at_ids import vocab_parallel_log_probs_at
from ..vocab.divergences import Divergence, DivergenceName, divergence_named
from ..vocab.full_divergence import check_weights, full_vocabulary_divergence, normalize_weights, weighted
from . import reduction
from .distributions import (
    NO_ENTRY,
    Distribution,
    FullDistribution,
    TopKDistribution,
    check_one_kind,
    check_same_indices,
)
from .reduction import LossAndCount, Normalization
from .topk_divergences import bucket_divergence


@dataclass(frozen=True)
class DistillationOptions:
    """Options of :func:`distillation_loss`.

    Attributes:
        divergence: its name; the formulas are in :mod:`..vocab.divergences`.
        beta: weight of the teacher in the mixture that ``"jensen_shannon"`` and the skewed divergences have.
        teacher_weights: weights of the divergences from several teachers; they are divided by their sum.
            ``None`` weights all teachers alike.
        normalization: what the loss is an average over; ``"constant"`` divides by ``constant_length``; see
            :func:`token_weights`.
    """

    divergence: DivergenceName = "reverse_kl"
    beta: float = 0.5
    teacher_weights: tuple[float, ...] | None = None
    normalization: Normalization = "token"
    constant_length: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", divergence_named(self.divergence, self.beta).beta)
        if self.teacher_weights is not None:
            object.__setattr__(self, "teacher_weights", check_weights(self.teacher_weights))
        reduction.check_normalization(self.normalization, self.constant_length)

    @property
    def measure(self) -> Divergence:
        """The divergence itself."""
        return divergence_named(self.divergence, self.beta)


@dataclass(frozen=True, eq=False)
class DistillationBatch:
    """The data of a distillation loss, besides the logits, for the responses of one microbatch.

    The distributions are of ``response_length`` positions each: :class:`TopKDistribution`, of a response all
    at the same indices, in any order and each once per token, and of one temperature and ``vocab_size`` where
    these are known; or :class:`FullDistribution`. Otherwise :class:`InvalidInputError` is raised. Under
    context parallelism every rank has the full responses.

    Attributes:
        teachers: for each teacher, its distribution of each response. With several teachers the divergences
            are averaged; what :func:`mix_teachers` or :func:`route_teachers` returns is *one* teacher.
        loss_masks: one mask ``[response_length]`` per response, zero for tokens without loss, such as the
            output of tools. Distributions are ignored at these tokens and may hold ``nan`` there.
        old: distributions of the policy that sampled, one per response, which the divergence
            ``"importance_weighted_reverse_kl"`` needs.
    """

    teachers: Sequence[Sequence[Distribution]]
    loss_masks: Sequence[Tensor]
    old: Sequence[Distribution] | None = None

    def __post_init__(self) -> None:
        reduction.check_masks(self.loss_masks)
        if not (isinstance(self.teachers, Sequence) and self.teachers):
            raise InvalidInputError(f"teachers are {self.teachers!r}, expected a list of at least one")
        if None in self.teachers:
            raise InvalidInputError(
                "a teacher is None, as forward_topk returns it off the last pipeline stage: make the batch "
                "in the loss function, which Megatron calls on the last stage only"
            )
        scored = {f"teacher {number}": teacher for number, teacher in enumerate(self.teachers)}
        if self.old is not None:
            scored["old"] = self.old
        if not all(isinstance(distributions, Sequence) for distributions in scored.values()):
            raise InvalidInputError("teachers: expected a list of distributions for each, and for old")
        check_one_kind("teachers and old", self.distributions)
        arguments.in_common(self.distributions)
        for name, distributions in scored.items():
            values, what = [one.tensors[0] for one in distributions], f"distributions of {name}"
            arguments.check_lengths(what, values, self.response_lengths, "the loss masks")
        if not self.is_full:
            for scores in zip(*scored.values(), strict=True):
                check_same_indices(scores)
        elif any(len(one.tensors) != 1 for one in self.old or ()):
            raise InvalidInputError("old is a mixture: pass the distributions of the one policy that sampled")

    @property
    def distributions(self) -> list[Distribution]:
        """Those of all teachers, and of the old policy."""
        return [one for each in (*self.teachers, self.old or ()) for one in each]

    @property
    def is_full(self) -> bool:
        """Whether the distributions are those over the whole vocabulary."""
        return isinstance(self.teachers[0][0], FullDistribution)

    @property
    def response_lengths(self) -> list[int]:
        """Number of tokens of each response, masked ones included."""
        return list(map(len, self.loss_masks))


def check_fit(batch: DistillationBatch, options: DistillationOptions) -> None:
    """Refuse what is no batch or no options, and options that do not fit the batch's distributions."""
    arguments.check_instance("batch", batch, DistillationBatch)
    arguments.check_instance("options", options, DistillationOptions)
    measure, name = options.measure, options.divergence
    if measure.needs_old and batch.old is None:
        raise InvalidInputError(f"divergence is {name!r}: old is needed, and missing")
    if batch.is_full and not measure.counts_tail:
        raise InvalidInputError(f"divergence is {name!r}, which is over k ids: use 'reverse_kl'")
    normalize_weights(options.teacher_weights, len(batch.teachers))


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
        normalization, and per token ``divergence`` (nats) and the probabilities ``student_tail`` and
        ``teacher_tail``. Errors are those of :func:`policy_loss`.
    """
    check_fit(batch, options)
    if batch.is_full:
        raise InvalidInputError("the teachers are full distributions: use make_distillation_loss_func")
    lengths = batch.response_lengths
    tail_log_probs = reduction.check_responses("tail_log_probs", tail_log_probs, lengths)
    log_probs = arguments.check_lengths("log_probs", log_probs, lengths, "the loss masks")
    for values, tail in zip(log_probs, tail_log_probs, strict=True):
        arguments.check_floats(log_probs=values, tail_log_probs=tail)
    log_probs_nk, tail_n = torch.cat(log_probs), torch.cat(tail_log_probs)
    _, _, per_token = _at_ids(batch, options, tail_n.device, slice(None))
    return summed(per_token(log_probs_nk, tail_n), batch, options)


def summed(values_n3: Tensor, batch: DistillationBatch, options: DistillationOptions) -> LossAndCount:
    """Return loss, count and metrics from divergence, and perhaps tails, of the full responses."""
    masks = each_on_device(batch.loss_masks, values_n3.device)
    how = options.normalization, options.constant_length, values_n3.dtype
    weights_n, count = reduction.weights_and_count(masks, *how)
    names = ("divergence", "student_tail", "teacher_tail")
    averages = dict(zip(names, values_n3.unbind(1), strict=False))
    divergence_n = averages["divergence"]
    metrics = reduction.metrics_of({"loss": divergence_n}, averages, weights_n, count)
    return (weights_n * divergence_n).sum(), count, metrics


def comparison(
    rows: Tensor, index: Tensor, batch: DistillationBatch, options: DistillationOptions, how: dict[str, Any]
) -> Callable[[Tensor], Tensor]:
    """Return the function from logits ``[T, V / tp]`` to the divergence at ``n`` tokens, ``[n, 1]``.

    For a top-k it returns ``[n, 3]``, with the probabilities of the tails of student and teachers, too.
    ``rows`` ``[n]`` are the tokens' rows of the logits, ``index`` ``[n]`` their positions in the
    concatenation of all responses, and ``how`` has arguments of :func:`vocab_parallel_log_probs`.
    """
    if batch.is_full:
        return _full_comparison(rows, index, batch, options, how)
    scored = batch.distributions
    arguments.in_common(scored, temperature=how["temperature"])
    vocabulary = VocabParallelOptions(how["tp_group"], vocab_size=how.get("vocab_size"))
    ids, all_ids, per_token = _at_ids(batch, options, rows.device, index)

    def compare(logits: Tensor) -> Tensor:
        num_ids = vocabulary.num_ids(logits.shape[1])
        arguments.in_common(scored, vocab_size=num_ids)
        if len(ids) < len(all_ids):
            # A rank that refused its own ids alone would leave the others waiting for its values.
            arguments.check_ids("indices", all_ids, num_ids, NO_ENTRY, "for no entry")
        return per_token(*vocab_parallel_log_probs_at(logits, ids, rows=rows, with_tail=True, **how))

    return compare


# --- with teachers that are known at k ids


def _at_ids(
    batch: DistillationBatch, options: DistillationOptions, device: torch.device, index: Tensor | slice
) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]:
    """Return the ids ``[n, k]`` of this rank's tokens, those of all response tokens, and a function.

    The function takes the student's log-probs at the ids ``[n, k]`` and of the tails ``[n]``, and returns
    what that of :func:`comparison` does. Tokens are at ``index``; masked ones have neither ids nor values.
    """
    counts = on_device(torch.cat(list(batch.loss_masks)), device) != 0
    mask_n, measure = counts[index], options.measure

    def masked(values: Tensor) -> Tensor:
        # Masked before anything is computed, since nan times zero is nan, in backward too.
        return torch.where(mask_n if values.dim() == 1 else mask_n[:, None], values, 0.0)

    scored = [*batch.teachers] if batch.old is None else [*batch.teachers, batch.old]
    whole = [TopKDistribution.cat(cast("Sequence[TopKDistribution]", one)).to(device) for one in scored]
    all_ids = whole[0].indices.masked_fill(~counts[:, None], NO_ENTRY)
    arguments.check_distinct("indices", all_ids)
    ids, teachers = all_ids[index], []
    for one in whole:
        values = masked(one.log_probs[index]), masked(one.tail_log_prob[index])
        teachers.append(one.with_tensors([ids, *values]))
    old = None if batch.old is None else teachers.pop()

    def per_token(log_probs_nk: Tensor, tail_n: Tensor) -> Tensor:
        log_probs_nk, tail_n = masked(log_probs_nk), masked(tail_n)
        total = teacher_tail = torch.zeros_like(tail_n)
        for weight, teacher in weighted(teachers, options.teacher_weights):
            others = teacher, old if measure.needs_old else None
            total = total + weight * bucket_divergence(measure, log_probs_nk, tail_n, *others)
            teacher_tail = teacher_tail + weight * teacher.tail_log_prob.exp()
        return torch.stack([total, masked(tail_n.detach().exp()), masked(teacher_tail)], 1)

    return ids, all_ids, per_token


# --- with teachers that are known over the whole vocabulary


def _full_comparison(
    rows: Tensor, index: Tensor, batch: DistillationBatch, options: DistillationOptions, how: dict[str, Any]
) -> Callable[[Tensor], Tensor]:
    """Return what :func:`comparison` does, for full distributions.

    Samples of the same teacher, or mixture, are compared together, masked tokens not at all. Hidden states go
    to the device of the logits when the function is called.
    """
    index, device = index.cpu(), rows.device
    counts = (torch.cat([mask.cpu() for mask in batch.loss_masks]) != 0)[index]
    old = FullDistribution.cat(cast("Sequence[FullDistribution]", batch.old)) if batch.old else None
    groups = []
    for weight, teacher in weighted(batch.teachers, options.teacher_weights):
        of_teacher = []
        for source in dict.fromkeys(one.source for one in teacher):
            mine = [one for one in cast("Sequence[FullDistribution]", teacher) if one.source == source]
            is_mine = torch.cat([torch.full((len(one),), one.source == source) for one in teacher])
            places = (counts & is_mine[index]).nonzero().squeeze(1)  # among the n tokens
            positions = (is_mine.cumsum(0) - 1)[index[places]]  # in the distribution of these samples
            of_teacher.append((weight, places, positions, FullDistribution.cat(mine)))
        # One at least, so that a rank without tokens refuses a teacher that does not fit, as others do.
        groups += [group for group in of_teacher if len(group[1])] or of_teacher[:1]
    if len(groups) > 1:
        # Each group reads the logits, and the first backward would overwrite what the others read.
        how = {**how, "inplace_backward": False}

    def compare(logits: Tensor) -> Tensor:
        divergences = []
        for weight, places, positions, distribution in groups:
            teacher, selected = distribution[positions].to(device), on_device(places, device)
            divergence = full_vocabulary_divergence(
                logits,
                teacher.logits(),
                divergence=options.divergence,
                beta=options.beta,
                teacher_weights=teacher.weights,
                old=None if old is None else old[index[places]].to(device).logits()[0],
                rows=rows[selected],
                **how,
            )
            divergences.append((selected, weight * divergence))
        total = divergences[0][1].new_zeros(len(index))
        for selected, divergence in divergences:
            total = total.index_add(0, selected, divergence)
        return total[:, None]

    return compare
