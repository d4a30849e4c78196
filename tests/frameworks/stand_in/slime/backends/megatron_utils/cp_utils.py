"""In the shape of slime's: chunks ``r`` and ``2 * size - 1 - r`` of each sequence are on rank ``r``."""

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor


def slice_log_prob_with_cp(log_prob: Tensor, total_length: int, response_length: int) -> Tensor:
    rank, size = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
    chunk_length = -(-total_length // (2 * size))
    chunk = torch.arange(total_length - response_length - 1, total_length - 1) // chunk_length
    return log_prob[(chunk == rank) | (chunk == 2 * size - 1 - rank)]
