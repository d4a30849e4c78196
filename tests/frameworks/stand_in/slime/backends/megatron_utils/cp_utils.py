"""In the shape of slime's slices for zigzag context parallelism."""

from __future__ import annotations

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor


def slice_log_prob_with_cp(log_prob: Tensor, total_length: int, response_length: int) -> Tensor:
    """Chunks ``r`` and ``2 * size - 1 - r`` of the sequence are on rank ``r``."""
    size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    chunk_length = -(-total_length // (2 * size))
    rows = torch.arange(total_length - response_length - 1, total_length - 1)
    chunk = rows // chunk_length
    return log_prob[(chunk == rank) | (chunk == 2 * size - 1 - rank)]
