"""In the shape of miles: context parallelism, zigzag or all-gather.

A rank without tokens of a sample has a placeholder that requires grad, also where other ranks' values do not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.nn
from megatron.core import parallel_state
from torch import Tensor


def slice_log_prob_with_cp(log_prob: Tensor, total_length: int, response_length: int) -> Tensor:
    """Chunks ``r`` and ``2 * size - 1 - r`` of the sequence are on rank ``r``."""
    rank, size = (
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_context_parallel_world_size(),
    )
    chunk_length = -(-total_length // (2 * size))
    chunk = torch.arange(total_length - response_length - 1, total_length - 1) // chunk_length
    return log_prob[(chunk == rank) | (chunk == 2 * size - 1 - rank)]


def allgather_cp_redistribute(
    res: dict[str, list[Tensor]],
    *,
    logits: Tensor,
    args: Any,
    total_lengths: list[int],
    response_lengths: list[int],
) -> None:
    first = parallel_state.get_context_parallel_rank() * logits.size(1)
    for key, values in res.items():
        whole, start = [], 0
        for value, total, response in zip(values, total_lengths, response_lengths, strict=True):
            before = min(max(first - (start + total - response - 1), 0), response)
            if len(value) == 0:
                whole.append(torch.zeros(response, dtype=value.dtype, requires_grad=True))
            else:
                whole.append(torch.nn.functional.pad(value, (before, response - before - len(value))))
            start += total
        group = parallel_state.get_context_parallel_group()
        gathered = torch.distributed.nn.all_reduce(torch.cat(whole), group=group).split(response_lengths)
        samples = zip(gathered, total_lengths, response_lengths, strict=True)
        res[key] = [slice_log_prob_with_cp(*sample) for sample in samples]
