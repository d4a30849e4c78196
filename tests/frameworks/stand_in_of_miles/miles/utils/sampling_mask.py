"""In the shape of miles since September 2026: for each response token, the ids that it was sampled from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RolloutSamplingMask(NamedTuple):
    """The ids of token ``i`` are ``ids[offsets[i] : offsets[i + 1]]``."""

    ids: Tensor
    offsets: Tensor

    @classmethod
    def from_mask_list(cls, masks: list[list[int]]) -> RolloutSamplingMask:
        lengths = torch.tensor([0, *map(len, masks)])
        return cls(torch.tensor([token for mask in masks for token in mask]), lengths.cumsum(0))

    def of_token(self, index: int) -> Tensor:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]
