"""Next-token distributions known by the log-probabilities of k tokens, and of all other tokens together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import InvalidInputError

#: Stands in place of a token id where a row has fewer than k entries.
NO_ENTRY = -100
_FLOATS = (torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class TopKDistribution:
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

    """

    indices: Tensor
    log_probs: Tensor
    tail_log_prob: Tensor

    def __post_init__(self) -> None:
        indices, log_probs, tail = self._tensors
        if indices.dim() != 2 or log_probs.shape != indices.shape or tail.shape != indices.shape[:1]:
            raise InvalidInputError(
                f"indices are {list(indices.shape)}, log_probs {list(log_probs.shape)} and tail_log_prob "
                f"{list(tail.shape)}, expected [n, k], [n, k] and [n]"
            )
        if indices.dtype != torch.int64 or log_probs.dtype not in _FLOATS or tail.dtype != log_probs.dtype:
            raise InvalidInputError(
                f"indices are {indices.dtype}, log_probs {log_probs.dtype} and tail_log_prob {tail.dtype}, "
                "expected torch.int64 and twice torch.float32 or twice torch.float64"
            )
        if not indices.device == log_probs.device == tail.device:
            raise InvalidInputError(
                f"indices on {indices.device}, log_probs on {log_probs.device} and tail_log_prob on "
                f"{tail.device}: expected one device"
            )
        if log_probs.requires_grad or tail.requires_grad:
            raise InvalidInputError(
                "log_probs or tail_log_prob require grad, and would keep the logits alive: compute them "
                "under torch.no_grad(), or detach them"
            )

    @property
    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.indices, self.log_probs, self.tail_log_prob

    @property
    def k(self) -> int:
        """Number of ids per position."""
        return self.indices.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, tokens: slice | Tensor) -> TopKDistribution:
        """Return the distributions at some positions: a slice, an index vector or a mask ``[n]``."""
        return TopKDistribution(*(tensor[tokens] for tensor in self._tensors))

    def split(self, lengths: Sequence[int]) -> list[TopKDistribution]:
        """Return one object per sample, given the number of positions of each sample."""
        parts = (torch.split(tensor, list(lengths)) for tensor in self._tensors)
        return [TopKDistribution(*part) for part in zip(*parts, strict=True)]

    @staticmethod
    def cat(distributions: Sequence[TopKDistribution]) -> TopKDistribution:
        """Concatenate distributions with the same k, at least one; the inverse of :meth:`split`."""
        ks = [distribution.k for distribution in distributions]
        if len(set(ks)) != 1:
            raise InvalidInputError(
                f"the distributions have k of {ks}; pass at least one, and the same k for all"
            )
        parts = zip(*(distribution._tensors for distribution in distributions), strict=True)
        return TopKDistribution(*map(torch.cat, parts))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TopKDistribution:
        """Return a copy on the device, or ``self``'s tensors if they are there already."""
        return TopKDistribution(*(tensor.to(device, non_blocking=non_blocking) for tensor in self._tensors))


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
