"""In the shape of slime's slices for zigzag context parallelism."""

from __future__ import annotations

from loss_parts import zigzag_part
from megatron.core import parallel_state as mpu
from torch import Tensor


def slice_log_prob_with_cp(log_prob: Tensor, total_length: int, response_length: int) -> Tensor:
    size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    return zigzag_part(log_prob, total_length, response_length, size, rank)
