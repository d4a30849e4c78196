"""What a distillation loss is computed of, besides the logits: teachers, masks, and options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ...errors import InvalidInputError
from ..logits.distributions import Distribution, check_same_indices
from ..logits.divergences import Divergence, DivergenceName, divergence_named
from .full_distribution import FullDistribution
from .policy import check_lengths
from .reduction import Normalization, check_normalization
from .teachers import check_one_kind, normalize_weights


@dataclass(frozen=True)
class DistillationOptions:
    """Options of :func:`distillation_loss`.

    Attributes:
        divergence: its name; the formulas are in :mod:`..logits.divergences`.
        beta: weight of the teacher in the mixture of student and teacher that ``"jensen_shannon"`` and the
            skewed divergences compare with.
        teacher_weights: weights of the divergences from several teachers; they are divided by their sum.
            ``None`` weights all teachers alike.
        normalization: what the loss is an average over; see :func:`token_weights`.
        constant_length: the divisor of the normalization ``"constant"``.
        num_ids: for full distributions, size of the vocabulary without padding; see
            :func:`.full_vocabulary_divergence`.
    """

    divergence: DivergenceName = "reverse_kl"
    beta: float = 0.5
    teacher_weights: tuple[float, ...] | None = None
    normalization: Normalization = "token"
    constant_length: int | None = None
    num_ids: int | None = None

    def __post_init__(self) -> None:
        divergence_named(self.divergence, self.beta)
        if self.teacher_weights is not None:
            normalize_weights(self.teacher_weights, len(self.teacher_weights))
        check_normalization(self.normalization, self.constant_length)

    @property
    def measure(self) -> Divergence:
        """The divergence itself."""
        return divergence_named(self.divergence, self.beta)


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
            values = [one.tensors[0][:, 0] for one in distributions]
            check_lengths(f"distributions of {name}", values, self.response_lengths)
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
        if options.measure.needs_old and self.old is None:
            raise InvalidInputError(f"divergence is {options.divergence!r}: old is needed, and missing")
        if self.is_full and not options.measure.counts_tail:
            raise InvalidInputError(
                f"divergence is {options.divergence!r}, which is over k ids: use 'reverse_kl'"
            )
        if not self.is_full and options.num_ids is not None:
            raise InvalidInputError("num_ids is for full distributions: a top-k names its ids")
        normalize_weights(options.teacher_weights, len(self.teachers))
