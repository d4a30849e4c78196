"""The exact divergence of a student from its teachers, over the whole vocabulary.

A teacher's distributions are known by its hidden states and its output layer; neither side's logits exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ...common.devices import copied_to
from ...errors import InvalidInputError
from ..vocab.arguments import (
    Rows,
    VocabParallelOptions,
    check_floats,
    check_instance,
    check_integer,
    check_list,
    check_tensor,
)
from ..vocab.deferred import DeferredLogits, deferred_logits
from ..vocab.distributions import Distribution
from ..vocab.divergences import DivergenceName, divergence_named
from ..vocab.full_divergence import DivergenceOptions, FullDivergence
from ..vocab.reduction import all_gather
from ..vocab.sources import SelectedRows, Source, rows_of
from .teachers import check_weights, weighted


@dataclass(frozen=True, eq=False)
class OutputHead:
    """This rank's part of a model's output layer.

    Attributes:
        weight: ``[V / tp, h]``.
        bias: ``[V / tp]``.
        logit_dtype: of the logits, if the layer computes them in a more precise dtype; see
            :func:`.deferred_logits`.
    """

    weight: Tensor
    bias: Tensor | None = None
    logit_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_floats(weight=self.weight)
        if self.weight.dim() != 2:
            raise InvalidInputError(f"weight is {list(self.weight.shape)}, expected [V / tp, h]")
        if self.bias is not None:
            check_floats(bias=self.bias)
            if self.bias.shape != self.weight.shape[:1] or self.bias.dtype != self.weight.dtype:
                raise InvalidInputError(
                    f"bias is {self.bias.dtype} {list(self.bias.shape)}, expected {self.weight.dtype} "
                    f"{list(self.weight.shape[:1])} as weight has"
                )

    def copied_to(self, device: torch.device | str) -> OutputHead:
        """Return a copy on the device; what comes from a GPU goes to pinned host memory."""
        return self._mapped(lambda tensor: copied_to(tensor, device))

    def resharded(self, width: int, tp_group: dist.ProcessGroup) -> OutputHead:
        """Return a copy with ``width`` rows on each rank, as many as the student's output layer has there.

        It is for a teacher whose vocabulary is padded to another size than the student's: under tensor
        parallelism, a rank's rows stand for other ids in the two. Rows that the teacher lacks are zero, and
        rows that are too many are left out: say with ``vocab_size`` how many ids there are.

        Args:
            width: ``V / tp`` of the student.
            tp_group: ranks that hold the other rows. Each rank has all of them while this runs, on the device
                of the weight; with NCCL that is a GPU.

        Raises:
            InvalidInputError: ``width`` is not a positive integer.
        """
        width = check_integer("width", width, 1, "the rows of the student's output layer on a rank")
        start = dist.get_rank(tp_group) * width

        def shard_of(tensor: Tensor) -> Tensor:
            mine = all_gather(tensor.contiguous(), tp_group).flatten(0, 1)[start : start + width]
            return torch.cat([mine, mine.new_zeros(width - len(mine), *mine.shape[1:])])

        return self._mapped(shard_of)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> OutputHead:
        bias = None if self.bias is None else function(self.bias)
        return OutputHead(function(self.weight), bias, self.logit_dtype)

    @property
    def tensors(self) -> list[Tensor]:
        """Weight and bias, if there is one."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, eq=False)
class FullDistribution(Distribution):
    """Next-token distributions at ``n`` positions, exact: those of one teacher, or a mixture of several.

    It takes ``2 * h`` bytes per position and teacher in bfloat16, while logits take ``2 * V``. ::

        head = output_head(teacher)
        hidden = forward_hidden_states(teacher, microbatches)
        distributions = [FullDistribution.from_hidden(hidden_lh, head) for hidden_lh in hidden]

    Attributes:
        hidden: for each teacher what its output layer gets, ``[n, h]``, after the final norm.
        heads: the output layer of each teacher; samples of the same teacher share one object.
        weights: weight of each teacher in the mixture; they are divided by their sum.
    """

    hidden: tuple[Tensor, ...]
    heads: tuple[OutputHead, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        check_list("hidden", self.hidden)
        if self.heads is None or self.weights is None:
            raise InvalidInputError("heads or weights are None; pass one of each per teacher")
        if not len(self.hidden) == len(self.heads) == len(self.weights) > 0:
            raise InvalidInputError(
                f"there are {len(self.hidden)} hidden states, {len(self.heads)} heads and "
                f"{len(self.weights)} weights; pass one each per teacher, and at least one teacher"
            )
        object.__setattr__(self, "weights", check_weights(self.weights))
        for hidden, head in zip(self.hidden, self.heads, strict=True):
            check_floats(hidden=hidden)
            check_instance("heads", head, OutputHead)
            fits = hidden.dim() == 2 == self.hidden[0].dim() and hidden.shape[1:] == head.weight.shape[1:]
            if not fits or len(hidden) != len(self.hidden[0]):
                n = len(self.hidden[0]) if self.hidden[0].dim() else "n"
                raise InvalidInputError(
                    f"hidden states are {list(hidden.shape)}, expected [{n}, h] for an output layer "
                    f"{list(head.weight.shape)} of [V / tp, h]"
                )

    @staticmethod
    def from_hidden(hidden: Tensor, head: OutputHead) -> FullDistribution:
        """Return the distributions of one teacher from its hidden states ``[n, h]``."""
        return FullDistribution((hidden,), (head,), (1.0,))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.hidden

    def with_tensors(self, tensors: Sequence[Tensor]) -> FullDistribution:
        """Return distributions of the same teachers; the output layers stay where they are.

        A loss copies the part of one tile after the other of an output layer to the device of the hidden
        states, where there are at most two.
        """
        return FullDistribution(tuple(tensors), self.heads, self.weights)

    @property
    def source(self) -> tuple[object, ...]:
        return *map(id, self.heads), *self.weights

    @classmethod
    def mixture(cls, distributions: Sequence[FullDistribution], weights: Sequence[float]) -> FullDistribution:
        pairs = zip(distributions, weights, strict=True)
        return FullDistribution(
            tuple(hidden for one in distributions for hidden in one.hidden),
            tuple(head for one in distributions for head in one.heads),
            tuple(weight * share / sum(one.weights) for one, weight in pairs for share in one.weights),
        )

    def logits(self) -> list[DeferredLogits]:
        """Return the deferred logits ``[n, V / tp]`` of each teacher."""
        return [
            deferred_logits(
                hidden.to(head.weight.dtype),
                head.weight.detach(),
                bias=head.bias,
                logit_dtype=head.logit_dtype,
            )
            for hidden, head in zip(self.hidden, self.heads, strict=True)
        ]


def full_vocabulary_divergence(
    student: Tensor,
    teacher: Tensor | Sequence[Tensor],
    *,
    divergence: DivergenceName = "reverse_kl",
    beta: float = 0.5,
    teacher_weights: Sequence[float] | None = None,
    old: Tensor | None = None,
    rows: Rows = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    inplace_backward: bool = False,
    block_bytes: int | None = None,
) -> Tensor:
    """Return the divergence of the student's next-token distributions from the teacher's, per row, in nats.

    The divergences are those of :mod:`..vocab.divergences`, summed over all ids instead of k ids and a tail;
    all but ``"generalized_kl"``.

    Args:
        student: logits or :class:`.DeferredLogits` ``[T, V / tp]``. Only these have a gradient.
        teacher: logits or deferred logits ``[n, V / tp]``, one row for each selected row of the student. The
            hidden sizes may differ. Several teachers are a mixture: their probabilities are averaged.
        divergence: its name.
        beta: weight of the teacher in the mixture of those that have one.
        teacher_weights: weights of the mixture, not negative; they are divided by their sum. ``None`` weights
            all teachers alike.
        old: logits or deferred logits ``[n, V / tp]`` of the policy that sampled, for
            ``"importance_weighted_reverse_kl"``.
        rows: which ``n`` of the ``T`` rows of the student; see :func:`.vocab_parallel_log_probs`, as for
            ``tp_group``, ``inplace_backward`` and ``block_bytes``.
        temperature: the logits of all are divided by it.
        vocab_size: number of token ids of all distributions; see :func:`.vocab_parallel_log_probs`. With it,
            and without tensor parallelism, the logits may be padded to different widths; with tensor
            parallelism see :meth:`.OutputHead.resharded`.

    Returns:
        ``[n]`` in float32 (float64 for float64 logits of the student), the same bits on all ranks of
        ``tp_group``. A log-probability below -10,000, such as -inf, counts as -10,000. NaN and +inf make NaN
        of their own row. A row whose value gets a gradient of zero has a gradient of zero, whatever its
        logits are.

    Raises:
        InvalidInputError: arguments do not fit; on every rank alike, before any collective. There is one
            all-gather of up to six numbers per row, and a second one of two or three numbers for divergences
            from a mixture of student and teacher, for a mixture of teachers, and where one distribution gives
            an id, or a block of ids, a probability of zero or nearly zero (log-probabilities more than 1,000
            nats apart) and another does not.
    """
    teachers = [teacher] if isinstance(teacher, Tensor) else check_list("teacher", teacher)
    measure = divergence_named(divergence, beta)
    if not measure.counts_tail:
        raise InvalidInputError(f"divergence is {divergence!r}, which is over k ids: use 'reverse_kl'")
    counted = weighted([(f"teacher {n}", logits) for n, logits in enumerate(teachers)], teacher_weights)
    named = [teacher for _, teacher in counted]
    if measure.needs_old:
        if old is None:
            raise InvalidInputError(f"divergence is {divergence!r}: old is needed, and missing")
        named.append(("old", old))
    options = VocabParallelOptions(
        tp_group=tp_group,
        temperature=temperature,
        vocab_size=vocab_size,
        inplace_backward=inplace_backward,
        block_bytes=block_bytes,
    )
    source = rows_of(student, rows, options, "student")
    others = []
    for name, logits in named:
        check_tensor(name, logits)
        logits = logits.detach() if logits.requires_grad else logits
        of_other = rows_of(logits, None, replace(options, inplace_backward=False), name)
        fits = of_other.width == source.width or (vocab_size is not None and options.tp_size == 1)
        if of_other.n != source.n or of_other.device != source.device or not fits:
            raise InvalidInputError(
                f"{name} is {list(logits.shape)} on {logits.device}, expected {source.n} rows of "
                f"{source.width} logits on {source.device}, as the student has; logits that are padded to "
                "another width need vocab_size, and under tensor parallelism OutputHead.resharded, too"
            )
        if inplace_backward and _share_memory(of_other, source):
            raise InvalidInputError(
                f"{name} is in the memory of the student's logits, which inplace_backward overwrites before "
                "it is read: pass a copy, or inplace_backward=False"
            )
        others.append(of_other)
    log_weights = tuple(math.log(weight) for weight, _ in counted)
    (values,) = FullDivergence(DivergenceOptions(measure, log_weights))(source, *others)
    return values


def _share_memory(a: Source, b: Source) -> bool:
    """Return whether two sources read the same memory. Every tensor without elements is at address 0."""
    if not isinstance(a, SelectedRows) or not isinstance(b, SelectedRows) or not a.logits.numel():
        return False
    return a.logits.untyped_storage().data_ptr() == b.logits.untyped_storage().data_ptr()
