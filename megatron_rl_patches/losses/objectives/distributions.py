"""Next-token distributions of a teacher, token by token: what all kinds share, and those of k tokens."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from ...common.devices import on_device
from ...errors import InvalidInputError
from ..vocab.arguments import (
    Rows,
    VocabParallelOptions,
    check_instance,
    check_integer,
    check_one_device,
    check_positive,
)
from ..vocab.sources import rows_of
from ..vocab.topk import TopK

#: Stands in place of a token id where a row has fewer than k entries.
NO_ENTRY = -100
_FLOATS = (torch.float32, torch.float64)

D = TypeVar("D", bound="Distribution")


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
            raise InvalidInputError(
                "the distributions are of different teachers, or of different k, or there are none; pass at "
                "least one, all of the same"
            )
        parts = zip(*(distribution.tensors for distribution in distributions), strict=True)
        return distributions[0].with_tensors([torch.cat(part) for part in parts])

    def to(self: D, device: torch.device | str, *, non_blocking: bool = False) -> D:
        """Return a copy on the device, or ``self``'s tensors if they are there already.

        What goes to a GPU is pinned first, and the CPU does not wait for it.
        """
        if torch.device(device).type == "cuda":
            return self.with_tensors([on_device(tensor, device) for tensor in self.tensors])
        return self.with_tensors([tensor.to(device, non_blocking=non_blocking) for tensor in self.tensors])


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
        vocab_size: of how many token ids the probabilities are; ``None`` if it is not known. The same holds.
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
            check_instance(name, tensor)
        if self.temperature is not None:
            object.__setattr__(self, "temperature", check_positive("temperature", self.temperature))
        if self.vocab_size is not None:
            check_integer("vocab_size", self.vocab_size, 1, "the number of token ids, or None")
        shapes_fit = (
            indices.dim() == 2 and indices.shape == log_probs.shape and indices.shape[:1] == tail.shape
        )
        dtypes_fit = indices.dtype == torch.int64 and log_probs.dtype == tail.dtype in _FLOATS
        if not shapes_fit or not dtypes_fit:
            actual = ", ".join(f"{name} {x.dtype} {list(x.shape)}" for name, x in named.items())
            raise InvalidInputError(
                f"{actual}: expected torch.int64 [n, k], and torch.float32 or torch.float64 [n, k] and [n]"
            )
        check_one_device(**named)
        if log_probs.requires_grad or tail.requires_grad:
            raise InvalidInputError(
                "log_probs or tail_log_prob require grad, and would keep the logits alive: compute them "
                "under torch.no_grad(), or detach them"
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
        return replace(super().cat(distributions), **in_common(distributions))

    @classmethod
    def mixture(cls, distributions: Sequence[TopKDistribution], weights: Sequence[float]) -> TopKDistribution:
        shared = in_common(distributions)
        check_same_indices(distributions)

        def mix(*log_probs: Tensor) -> Tensor:
            pairs = zip(log_probs, weights, strict=True)
            # A teacher of weight zero may hold NaN, and zero times NaN is NaN.
            parts = [values.double() + math.log(weight) for values, weight in pairs if weight]
            return torch.stack(parts).logsumexp(0).to(log_probs[0].dtype)

        (indices, *_), *log_probs = zip(*(one.tensors for one in distributions), strict=True)
        return TopKDistribution(indices, *(mix(*values) for values in log_probs), **shared)


@torch.no_grad()
def vocab_parallel_topk(
    logits: Tensor,
    k: int,
    *,
    tp_group: dist.ProcessGroup | None = None,
    rows: Rows = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    block_bytes: int | None = None,
) -> TopKDistribution:
    """Return the k most probable tokens of each selected row, in descending order; ties go to the lowest ids.

    One all-gather over ``tp_group``: two numbers per candidate and two for the tail, ``16 * k + 16`` bytes
    per row and rank. No autograd graph.

    Args:
        logits: ``[T, V / tp]``; ``tp_group``, ``rows``, ``temperature``, ``vocab_size`` and ``block_bytes``
            too are those of :func:`vocab_parallel_log_probs`.
        k: number of tokens, from 1 to the size of the vocabulary.

    Returns:
        The distributions of ``n`` tokens, in float32 (float64 for float64 logits), the same bits on all ranks
        of ``tp_group``. A row with NaN or +inf has any ids, each once, and NaN for all log-probabilities.

    Raises:
        InvalidInputError: arguments do not fit; raised on every rank alike and before the collective.
    """
    options = VocabParallelOptions(tp_group, temperature, False, block_bytes, vocab_size=vocab_size)
    source = rows_of(logits, rows, options)
    if source.device.type == "meta":
        raise InvalidInputError("logits are on the device meta, where they have no values: pass real ones")
    size = options.num_ids(source.width)
    k = check_integer("k", k, 1, f"from 1 to {size}, the size of the vocabulary", highest=size)
    return TopKDistribution(*TopK(k)(source), temperature=options.temperature, vocab_size=size)


class LogProbs(list[Tensor]):
    """Log-probabilities of responses over a vocabulary of ``vocab_size`` token ids; a slice has it, too."""

    def __init__(self, values: Iterable[Tensor], vocab_size: int | None) -> None:
        super().__init__(values)
        self.vocab_size = vocab_size

    def __getitem__(self, index: Any) -> Any:
        values = super().__getitem__(index)
        return LogProbs(values, self.vocab_size) if isinstance(index, slice) else values

    def __reduce__(self) -> tuple[Any, ...]:
        return LogProbs, ([*self], self.vocab_size)


# ``tree_map`` and ``torch.load``, with its default ``weights_only=True``, take them as they take plain lists.
register_pytree_node(LogProbs, lambda x: ([*x], x.vocab_size), LogProbs)
torch.serialization.add_safe_globals([LogProbs])


def in_common(scored: Sequence[Any], **loss: float) -> dict[str, Any]:
    """Return temperature and vocab_size of scores, ``None`` if that of one is not known; refuse several.

    Args:
        **loss: those of the loss, from which no known one may differ.
    """
    shared: dict[str, Any] = {}
    for name in ("temperature", "vocab_size"):
        values = [getattr(one, name, None) for one in scored]
        known = [float(number) for number in (loss.get(name), *values) if number is not None]
        if any(not math.isclose(number, known[0], rel_tol=1e-7) for number in known):  # some are in float32
            whose = "scores and loss" if name in loss else "scores"
            numbers = " and ".join(f"{number:.9g}" for number in dict.fromkeys(known))
            raise InvalidInputError(
                f"{whose} differ in {name}, {numbers}: pass the same to the loss and to what scores for it"
            )
        shared[name] = None if None in values else values[0]
    return shared


def check_same_indices(distributions: Sequence[Any]) -> None:
    """Raise :class:`InvalidInputError` if the indices of :class:`TopKDistribution` differ."""
    first = distributions[0].indices
    for number, distribution in enumerate(distributions[1:], 1):
        indices = distribution.indices
        if indices is not first and not torch.equal(indices, first):
            raise InvalidInputError(
                f"distributions 0 and {number} have different indices ({list(first.shape)} and "
                f"{list(indices.shape)}): score every teacher at the same ids, those of the student's top-k, "
                "with TopKDistribution(ids, *vocab_parallel_log_probs_at(logits, ids, with_tail=True))"
            )


def log1mexp(x: Tensor) -> Tensor:
    """Return ``log(1 - exp(x))`` for ``x <= 0``; -inf with a gradient of zero for ``x`` above.

    With ``x = log_probs.logsumexp(1)`` it is the tail's log-probability, for log-probabilities that were
    stored without their tail. Their sum is rounded, so in float32 a tail below 1e-3 has few correct digits.
    """
    lost = x > -torch.finfo(x.dtype).tiny
    inside = torch.where(lost, -1.0, x)
    # One is accurate near zero, the other far from it (Maechler 2012, "log(1 - exp(-|a|))").
    near, far = (-inside.clamp(min=-1.0).expm1()).log(), (-inside.clamp(max=-0.5).exp()).log1p()
    return torch.where(lost, float("-inf"), torch.where(inside > -0.6931, near, far))
