"""Teachers that are known over the whole vocabulary, and several teachers as one.

A teacher's distributions are known by its hidden states and its output layer; its logits need not exist.
Several teachers are a mixture of their distributions, or one for each sample. All must share the student's
vocabulary. Those that are known at k ids must score the same ids, those of the *student's* top-k when it
sampled. Mixture and divergences are then exact for the k ids and for the tail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...common.devices import copied_to
from ...errors import InvalidInputError
from ..vocab.arguments import check_floats, check_instance, check_integer, check_list
from ..vocab.deferred import DeferredLogits, deferred_logits
from ..vocab.full_divergence import check_weights, normalize_weights
from ..vocab.reduction import all_gather
from .distributions import D, Distribution

T = TypeVar("T")


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

    def logits(self, hidden: Tensor) -> DeferredLogits:
        """Return the deferred logits of hidden states, without a gradient for the weight."""
        hidden, weight = hidden.to(self.weight.dtype), self.weight.detach()
        return deferred_logits(hidden, weight, bias=self.bias, logit_dtype=self.logit_dtype)

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
        counts = [0 if values is None else len(values) for values in (self.hidden, self.heads, self.weights)]
        if len(set(counts)) > 1 or not counts[0]:
            raise InvalidInputError(
                f"there are {counts[0]} hidden states, {counts[1]} heads and {counts[2]} weights; pass one "
                "each per teacher, and at least one teacher"
            )
        object.__setattr__(self, "weights", check_weights(self.weights))
        for hidden, head in zip(self.hidden, self.heads, strict=True):
            check_floats(hidden=hidden)
            check_instance("heads", head, OutputHead)
            n = len(self.hidden[0]) if self.hidden[0].dim() == 2 else "n"
            if hidden.shape != (n, head.weight.shape[1]):
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
        return [head.logits(hidden) for hidden, head in zip(self.hidden, self.heads, strict=True)]


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


def check_one_kind(name: str, distributions: Sequence[Distribution]) -> None:
    """Raise :class:`InvalidInputError` unless there are distributions, all of one kind."""
    kinds = {type(distribution) for distribution in distributions or ()}
    if len(kinds) != 1 or not all(issubclass(kind, Distribution) for kind in kinds):
        names = " and ".join(sorted(kind.__name__ for kind in kinds)) or "missing"
        raise InvalidInputError(
            f"the distributions of {name} are {names}; pass one kind, TopKDistribution or FullDistribution"
        )
