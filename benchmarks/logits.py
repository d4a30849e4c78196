"""A rank's logits: what losses and top-k are given, and the units of their costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .measure import Call, Cost, Result

COPY = "copy"
REFERENCE_ROWS = 64


@dataclass(frozen=True)
class LogitsSetup:
    tp_size: int
    rows: int
    vocab: int
    dtype: torch.dtype = torch.float32

    @property
    def logits_bytes(self) -> int:
        return self.rows * self.vocab // self.tp_size * self.dtype.itemsize

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"TP {self.tp_size}, {dtype} [{self.rows}, {self.vocab}]"


class Logits:
    """Logits of this rank, and of the whole vocabulary for a few rows."""

    def __init__(self, setup: LogitsSetup, group: dist.ProcessGroup) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.generator = torch.Generator(self.device).manual_seed(0)
        whole = 2 * torch.randn(setup.rows, setup.vocab, generator=self.generator, device=self.device)
        width = setup.vocab // setup.tp_size
        self.group = group
        self.columns = slice(group.rank() * width, (group.rank() + 1) * width)
        self.pristine = whole[:, self.columns].to(setup.dtype, copy=True).contiguous()
        self.first_rows = whole[:REFERENCE_ROWS].to("cpu", setup.dtype, copy=True)
        self.one = torch.ones((), dtype=setup.dtype, device=self.device, requires_grad=True)

    def fresh(self) -> Tensor:
        """Return logits as a model hands them over: no leaf, and a storage of their own."""
        return self.pristine * self.one

    def copy(self) -> Call:
        target = torch.empty_like(self.pristine)
        return Call(lambda _: target.copy_(self.pristine))


def in_logits(result: Result, cost: Cost | None) -> float:
    """Return the bytes at the peak in those of the logits; not a number without a cost."""
    return cost.peak_bytes / result.setup.logits_bytes if cost else math.nan


def in_copies(result: Result, mode: str, cost: Cost | None) -> float:
    """Return the time in copies of the logits; not a number without a cost."""
    return cost.milliseconds / result.costs[mode][COPY].milliseconds if cost else math.nan
