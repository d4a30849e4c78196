"""Sizes and names of the output layers that the benchmark measures and the rehearsal counts."""

from dataclasses import dataclass

import torch

BASE, DEFERRED = "logits materialized, `lean-loss`", "deferred"
NOT_IN_PLACE, ALL_KEPT, STOCK = f"{BASE}, not in place", "deferred, all kept", "stock code (slime)"
#: Follows the name of a head whose loss reads every fourth row.
QUARTER = ", a quarter of the rows"


@dataclass(frozen=True)
class Setup:
    """Hidden states ``[rows, hidden]`` and an output layer ``[vocabulary, hidden]``."""

    rows: int
    hidden: int
    vocabulary: int
    dtype: torch.dtype = torch.float32

    @property
    def logits_bytes(self) -> int:
        """Bytes of float32 logits."""
        return 4 * self.rows * self.vocabulary

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"[{self.rows}, {self.hidden}] × {self.vocabulary}, {dtype}"
