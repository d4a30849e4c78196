"""What the eager and the compiled way over a rank's own logits have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_MIB = 1 << 20


class Term(NamedTuple):
    """``exp(z) * (a + b * z)`` with ``z = (x - top) / temperature``: the part of one softmax in a gradient.

    ``[n, 1]`` each. ``top`` is the largest logit of *all* ranks, ``share`` is ``exp(z)`` of the largest one
    of this rank: 0 where it has none that counts.
    """

    top: Tensor
    share: Tensor
    a: Tensor
    b: Tensor | None

    def of(self, block: slice) -> Term:
        top, share, a = self.top[block], self.share[block], self.a[block]
        return Term(top, share, a, None if self.b is None else self.b[block])


class Target(NamedTuple):
    """Where the gradient is not the sum of its terms, ``[n, 1]`` each."""

    column: Tensor  # int64, a column of this rank; -1 where another rank has the target
    value: Tensor  # the gradient there
    counts: Tensor  # bool; a row that does not count has no gradient, whatever its logits are


@dataclass(frozen=True, eq=False)
class Shard:
    """The rows that a loss reads of ``logits`` ``[T, V / tp]``.

    ``rows`` are a slice with step 1, or ``n`` distinct row numbers. ``keep_mask`` ``[n, V / tp]`` says which
    columns the log-probabilities see beside the target.
    """

    logits: Tensor
    rows: slice | Tensor
    keep_mask: Tensor | None
    temperature: float
    block_bytes: int | None

    @property
    def n(self) -> int:
        return self.rows.stop - self.rows.start if isinstance(self.rows, slice) else len(self.rows)

    @property
    def dtype(self) -> torch.dtype:
        """Of the statistics."""
        return torch.float64 if self.logits.dtype == torch.float64 else torch.float32

    def row_numbers(self) -> Tensor:
        if isinstance(self.rows, slice):
            return torch.arange(self.rows.start, self.rows.stop, device=self.logits.device)
        return self.rows

    def blocks(self, buffers: int, width: int | None = None) -> list[slice]:
        """Ranges of the ``n`` rows, such that ``buffers`` of one block each take ``block_bytes`` together.

        The buffers are of ``width`` columns: those of the logits, if none is given.
        """
        size = self.block_bytes or _default_block_bytes(self.logits)
        row_bytes = max(width or self.logits.shape[1], 1) * self.dtype.itemsize * max(buffers, 1)
        step = max(1, size // row_bytes)
        return [slice(start, min(start + step, self.n)) for start in range(0, self.n, step)]

    def view(self, tensor: Tensor, block: slice) -> Tensor:
        """A block of rows of a tensor like the logits; where the rows are a slice."""
        assert isinstance(self.rows, slice)
        return tensor[self.rows.start + block.start : self.rows.start + block.stop]

    def gradient_buffer(self, in_place: bool) -> Tensor:
        """Like the logits, or themselves, and zero in the rows that are not the shard's."""
        logits = self.logits.detach()
        if isinstance(self.rows, slice):
            gradient = logits if in_place else torch.empty_like(logits)
            gradient[: self.rows.start].zero_()
            gradient[self.rows.stop :].zero_()
            return gradient
        if not in_place:
            return torch.zeros_like(logits)
        others = torch.ones(len(logits), dtype=torch.int8, device=logits.device).index_fill_(0, self.rows, 0)
        # As many as there are by now, so that the size need not be asked of a GPU.
        return logits.index_fill_(0, others.argsort(descending=True)[: len(logits) - self.n], 0.0)


def floor(dtype: torch.dtype) -> float:
    """A ``z`` with ``exp(z) == 0`` to take the place of -inf, since ``0 * inf`` is not a number."""
    return -750.0 if dtype == torch.float64 else -110.0


def _default_block_bytes(logits: Tensor) -> int:
    one_percent = logits.numel() * logits.element_size() // 100
    if logits.device.type == "cpu":
        return max(min(2 * _MIB * torch.get_num_threads(), one_percent), _MIB)
    return max(64 * _MIB, one_percent)
