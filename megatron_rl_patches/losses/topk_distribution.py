"""Next-token distributions of which the log-probabilities of k tokens are known, and that of all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidInputError

#: In the place of an id: no entry.
NO_ENTRY = -100
_FLOATS = (torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class TopKDistribution:
    """The distributions of ``n`` tokens: k chosen ids each, and a tail, which is every other id together.

    Their probabilities add up to one: k + 1 buckets. Nothing in it requires grad. ::

        old = vocab_parallel_topk(logits, k)
        teacher = TopKDistribution(
            old.indices, *vocab_parallel_log_probs_at(teacher_logits, old.indices, with_tail=True)
        )

    Attributes:
        indices: int64 ``[n, k]``, token ids in the whole vocabulary, distinct in a row; -100 for no entry,
            whose log-probability is -inf. In hosts the most probable ids of the policy that sampled.
        log_probs: float32 or float64 ``[n, k]``.
        tail_log_prob: ``[n]``; -inf where the k are the whole vocabulary. Where only ``log_probs`` were
            stored, as by serving engines, ``log1mexp(log_probs.logsumexp(1))`` is what can be had.

    Raises:
        InvalidInputError: shapes, dtypes or devices do not fit together, or something requires grad.
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
        return self.indices.shape[1]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, tokens: slice | Tensor) -> TopKDistribution:
        """Those of some tokens: a slice, an index or a mask, ``[n]``."""
        return TopKDistribution(*(tensor[tokens] for tensor in self._tensors))

    def split(self, lengths: Sequence[int]) -> list[TopKDistribution]:
        """One per sample, as the logits of a packed microbatch are all samples' end to end."""
        parts = [torch.split(tensor, list(lengths)) for tensor in self._tensors]
        return [TopKDistribution(*part) for part in zip(*parts, strict=True)]

    @staticmethod
    def cat(distributions: Sequence[TopKDistribution]) -> TopKDistribution:
        """End to end; the opposite of :meth:`split`."""
        if len({distribution.k for distribution in distributions}) != 1:
            raise InvalidInputError(
                f"the distributions have k of {[distribution.k for distribution in distributions]}; "
                "give at least one, and the same k for all"
            )
        parts = zip(*(distribution._tensors for distribution in distributions), strict=True)
        return TopKDistribution(*map(torch.cat, parts))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TopKDistribution:
        return TopKDistribution(*(tensor.to(device, non_blocking=non_blocking) for tensor in self._tensors))


def log1mexp(x: Tensor) -> Tensor:
    """``log(1 - exp(x))`` for ``x <= 0``: the tail's log-probability from the log of what is not the tail.

    For *stored* log-probabilities only. Their sum was rounded, and of a tail below 1e-3 few digits are left
    in float32; where there are logits, ``vocab_parallel_log_probs_at(..., with_tail=True)`` has all of them.

    Where the tail is lost, with ``x`` at zero or above, it is -inf with a gradient of zero.
    """
    lost = x > -torch.finfo(x.dtype).tiny
    inside = torch.where(lost, -1.0, x)
    # Each is exact where the other is not (Maechler 2012, "Accurately computing log(1 - exp(-|a|))").
    near, far = (-inside.clamp(min=-1.0).expm1()).log(), (-inside.clamp(max=-0.5).exp()).log1p()
    return torch.where(lost, float("-inf"), torch.where(inside > -0.6931, near, far))
