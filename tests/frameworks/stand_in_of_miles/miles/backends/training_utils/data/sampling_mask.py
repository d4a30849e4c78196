"""In the shape of miles since September 2026: a mask over this rank's rows and columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....utils.sampling_mask import RolloutSamplingMask


def build_local_sampling_mask(
    logits: Tensor, sampling_mask: RolloutSamplingMask, response_indices: Sequence[int], *, tp_rank: int
) -> Tensor:
    mask = torch.zeros(logits.shape, dtype=torch.bool)
    for row, index in enumerate(response_indices):
        columns = sampling_mask.of_token(index) - tp_rank * logits.size(-1)
        mask[row, columns[(columns >= 0) & (columns < logits.size(-1))]] = True
    return mask
