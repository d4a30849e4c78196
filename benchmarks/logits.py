"""A rank's logits, as losses and top-k are given them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .measure import COPY, DEVICE, Call

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
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.options: dict[str, Any] = {"generator": generator, "device": DEVICE}
        whole = 2 * torch.randn(setup.rows, setup.vocab, **self.options)
        width = setup.vocab // setup.tp_size
        self.group = group
        self.columns = slice(group.rank() * width, (group.rank() + 1) * width)
        self.pristine = whole[:, self.columns].to(setup.dtype, copy=True).contiguous()
        self.first_rows = whole[:REFERENCE_ROWS].to("cpu", setup.dtype, copy=True)
        self.one = torch.ones((), dtype=setup.dtype, device=DEVICE, requires_grad=True)

    def fresh(self) -> Tensor:
        """Return logits as a model hands them over: no leaf, and a storage of their own."""
        return self.pristine * self.one

    def copy(self) -> dict[str, Call]:
        target = torch.empty_like(self.pristine)
        return {COPY: Call(lambda _: target.copy_(self.pristine))}
