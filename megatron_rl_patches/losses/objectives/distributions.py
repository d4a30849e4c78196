"""Next-token distributions of teachers, known at k ids and a tail, or over the whole vocabulary.

A :class:`FullDistribution` is known by hidden states and an output layer; its logits need not exist. A
:class:`TopKDistribution` has the ids of the *student's* top-k when it sampled, the same for all teachers, so
that mixture and divergences are exact for these ids and for the tail. All share the student's vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from ...common.devices import on_device
from ...errors import InvalidInputError
from ..output_layer import OutputHead
from ..vocab import arguments
from ..vocab.deferred import DeferredLogits
from ..vocab.full_divergence import check_weights, normalize_weights

#: Stands in place of a token id where a row has fewer than k entries.
NO_ENTRY = -100
_FLOATS = (torch.float32, torch.float64)

D = TypeVar("D", bound="Distribution")
T = TypeVar("T")


class Distribution(ABC):
    """Next-token distributions at ``n`` positions: those of one teacher, or of a mixture."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What has one row per position, ``[n, ...]`` each."""

    @abstractmethod
    def with_tensors(self: D, tensors: Sequence[Tensor]) -> D:
        """Return distributions of the same teachers at other positions."""

    @property
    @abstractmethod
    def source(self) -> tuple[object, ...]:
        """What two objects have in common that :meth:`cat` can join."""

    @classmethod
    @abstractmethod
    def mixture(cls: type[D], distributions: Sequence[D], weights: Sequence[float]) -> D:
        """Return ``sum of weight * probability`` of distributions at the same positions."""

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self: D, tokens: slice | Tensor) -> D:
        """Return the distributions at some positions: a slice, an index vector or a mask ``[n]``."""
        return self.with_tensors([tensor[tokens] for tensor in self.tensors])

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, which grow with the number of positions."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def split(self: D, lengths: Sequence[int]) -> list[D]:
        """Return one object per sample, given the number of positions of each sample."""
        parts = (torch.split(tensor, list(lengths)) for tensor in self.tensors)
        return [self.with_tensors(part) for part in zip(*parts, strict=True)]

    @classmethod
    def cat(cls: type[D], distributions: Sequence[D]) -> D:
        """Concatenate distributions of the same teachers, at least one; the inverse of :meth:`split`."""
        if len({distribution.source for distribution in distributions}) != 1:
            problem = "the distributions are of different teachers, or of different k, or there are none"
            raise InvalidInputError(f"{problem}; pass at least one, all of the same")
        parts = zip(*(distribution.tensors for distribution in distributions), strict=True)
        return distributions[0].with_tensors([torch.cat(part) for part in parts])

    def to(self: D, device: torch.device | str) -> D:
        """Return them on the device; the CPU does not wait for copies to a GPU."""
        return self.with_tensors([on_device(tensor, device) for tensor in self.tensors])


@dataclass(frozen=True, eq=False)
class TopKDistribution(Distribution):
    """Next-token distributions at ``n`` positions: k chosen ids each, and a tail of all other ids together.

    The probabilities of the k + 1 buckets add up to one. No tensor may require grad, and shapes, dtypes and
    devices must fit together; if not, :class:`InvalidInputError` is raised. ::

        student = vocab_parallel_topk(logits, k)
        log_probs, tail = vocab_parallel_log_probs_at(teacher_logits, student.indices, with_tail=True)
        teacher = TopKDistribution(student.indices, log_probs, tail)

    Attributes:
        indices: token ids in the whole vocabulary, int64 ``[n, k]``, distinct in a row. -100 marks an empty
            entry, with a log-probability of -inf.
        log_probs: their log-probabilities in nats, float32 or float64 ``[n, k]``.
        tail_log_prob: log-probability of all other ids together, ``[n]``, in the same dtype; -inf if the k
            ids are the whole vocabulary.
        temperature: what the logits were divided by; ``None`` if it is not known. Distributions of different
            temperatures are neither joined, mixed nor compared, and a loss at another one refuses them.
        vocab_size: of how many token ids the probabilities are; ``None`` if unknown. They must agree, too.
    """

    indices: Tensor
    log_probs: Tensor
    tail_log_prob: Tensor
    temperature: float | None = field(default=None, kw_only=True)
    vocab_size: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        indices, log_probs, tail = self.tensors
        named = {"indices": indices, "log_probs": log_probs, "tail_log_prob": tail}
        for name, tensor in named.items():
            arguments.check_instance(name, tensor)
        if self.temperature is not None:
            object.__setattr__(self, "temperature", arguments.check_positive("temperature", self.temperature))
        if self.vocab_size is not None:
            arguments.check_integer("vocab_size", self.vocab_size, 1, "the number of token ids, or None")
        fits = indices.dim() == 2 and indices.shape == log_probs.shape and indices.shape[:1] == tail.shape
        if not fits or indices.dtype != torch.int64 or not log_probs.dtype == tail.dtype in _FLOATS:
            actual = ", ".join(f"{name} {x.dtype} {list(x.shape)}" for name, x in named.items())
            expected = "torch.int64 [n, k], and torch.float32 or torch.float64 [n, k] and [n]"
            raise InvalidInputError(f"{actual}: expected {expected}")
        arguments.check_one_device(**named)
        if log_probs.requires_grad or tail.requires_grad:
            raise InvalidInputError(
                "log_probs or tail_log_prob require grad, and would keep the logits alive: detach them"
            )

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.indices, self.log_probs, self.tail_log_prob

    def with_tensors(self, tensors: Sequence[Tensor]) -> TopKDistribution:
        return TopKDistribution(*tensors, temperature=self.temperature, vocab_size=self.vocab_size)

    @property
    def source(self) -> tuple[object, ...]:
        return (self.k,)

    @property
    def k(self) -> int:
        """Number of ids per position."""
        return self.indices.shape[1]

    @classmethod
    def cat(cls, distributions: Sequence[TopKDistribution]) -> TopKDistribution:
        return replace(super().cat(distributions), **arguments.in_common(distributions))

    @classmethod
    def mixture(cls, distributions: Sequence[TopKDistribution], weights: Sequence[float]) -> TopKDistribution:
        shared = arguments.in_common(distributions)
        check_same_indices(distributions)

        def mix(*log_probs: Tensor) -> Tensor:
            pairs = zip(log_probs, weights, strict=True)
            # A teacher of weight zero may hold NaN, and zero times NaN is NaN.
            parts = [values.double() + math.log(weight) for values, weight in pairs if weight]
            return torch.stack(parts).logsumexp(0).to(log_probs[0].dtype)

        (indices, *_), *log_probs = zip(*(one.tensors for one in distributions), strict=True)
        return TopKDistribution(indices, *(mix(*values) for values in log_probs), **shared)


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
        arguments.check_list("hidden", self.hidden)
        counts = [0 if values is None else len(values) for values in (self.hidden, self.heads, self.weights)]
        if len(set(counts)) > 1 or not counts[0]:
            numbers = f"there are {counts[0]} hidden states, {counts[1]} heads and {counts[2]} weights"
            raise InvalidInputError(f"{numbers}; pass one each per teacher, and at least one teacher")
        object.__setattr__(self, "weights", check_weights(self.weights))
        for hidden, head in zip(self.hidden, self.heads, strict=True):
            arguments.check_floats(hidden=hidden)
            arguments.check_instance("heads", head, OutputHead)
            n = len(self.hidden[0]) if self.hidden[0].dim() == 2 else "n"
            if hidden.shape != (n, head.weight.shape[1]):
                expected = f"[{n}, h] for an output layer {list(head.weight.shape)} of [V / tp, h]"
                raise InvalidInputError(f"hidden states are {list(hidden.shape)}, expected {expected}")

    @staticmethod
    def from_hidden(hidden: Tensor, head: OutputHead) -> FullDistribution:
        """Return the distributions of one teacher from its hidden states ``[n, h]``."""
        return FullDistribution((hidden,), (head,), (1.0,))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.hidden

    def with_tensors(self, tensors: Sequence[Tensor]) -> FullDistribution:
        """Return distributions of the same teachers; output layers stay, and losses copy part by part."""
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


# --- several teachers


def mix_teachers(teachers: Sequence[D], weights: Sequence[float] | None = None) -> D:
    """Return the mixture ``sum of weight * probability`` of the teachers' distributions.

    Args:
        teachers: distributions of the same ``n`` positions, all :class:`TopKDistribution` at the same
            indices, or all :class:`FullDistribution`. A mixture of these keeps the hidden states of all.
        weights: one weight per teacher, not negative; they are divided by their sum. ``None`` weights all
            teachers alike.

    Raises:
        InvalidInputError: there are no teachers, they are of different kinds or temperatures, the weights are
            invalid, or the indices differ. An id that stands twice at a position is left for the losses to
            refuse, since a loss mask may leave the position out.
    """
    check_one_kind("teachers", teachers)
    weights = normalize_weights(weights, len(teachers))
    return type(teachers[0]).mixture(teachers, weights)


def route_teachers(
    names: Sequence[str], values: Mapping[str, Sequence[T | None] | Mapping[int, T]]
) -> list[T]:
    """Return, for each sample, the value of the teacher that the sample names.

    The teachers' ``values`` are distributions or anything else. A teacher has either one value per sample,
    ``None`` for samples that it did not score, or a mapping from the sample's position. Where a named teacher
    or its value is missing, :class:`InvalidInputError` is raised.
    """
    if names is None or not isinstance(values, Mapping):
        raise InvalidInputError("names are a list of names, and values a mapping from these names")
    if unknown := sorted(set(names) - set(values)):
        raise InvalidInputError(f"samples name the teachers {unknown}, expected some of {sorted(values)}")
    routed: list[T] = []
    for sample, name in enumerate(names):
        scored = values[name]
        has_it = sample in scored if isinstance(scored, Mapping) else sample < len(scored)
        if not has_it or (value := scored[sample]) is None:
            problem = f"sample {sample} names the teacher {name!r}, which has nothing for it"
            raise InvalidInputError(f"{problem}: score the sample with that teacher")
        routed.append(value)
    return routed


def check_one_kind(name: str, distributions: Sequence[Distribution]) -> None:
    """Raise :class:`InvalidInputError` unless there are distributions, all of one kind."""
    kinds = {type(distribution) for distribution in distributions or ()}
    if len(kinds) != 1 or not all(issubclass(kind, Distribution) for kind in kinds):
        names = " and ".join(sorted(kind.__name__ for kind in kinds)) or "missing"
        expected = "pass one kind, TopKDistribution or FullDistribution"
        raise InvalidInputError(f"the distributions of {name} are {names}; {expected}")


def check_same_indices(distributions: Sequence[TopKDistribution]) -> None:
    """Raise :class:`InvalidInputError` if the indices of :class:`TopKDistribution` differ."""
    first, *others = [distribution.indices for distribution in distributions]
    for number, indices in enumerate(others, 1):
        if indices is not first and not torch.equal(indices, first):
            raise InvalidInputError(
                f"distributions 0 and {number} have different indices ({list(first.shape)} and "
                f"{list(indices.shape)}): score every teacher at the same ids, those of the student's top-k, "
                "with TopKDistribution(ids, *vocab_parallel_log_probs_at(logits, ids, with_tail=True))"
            )
