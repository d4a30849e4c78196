"""In the shape of miles since September 2026: which rows of a sample a context-parallel rank has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.nn
from torch import Tensor

from ..parallel import get_parallel_state


def zigzag_pieces(total: int, response: int) -> list[tuple[int, int, int]]:
    """Return for each of the rank's two chunks where it begins, and which rows of it predict the response.

    The two numbers count from the first row that predicts the response.
    """
    cp, first = get_parallel_state().cp, total - response - 1
    size = -(-total // (2 * cp.size))
    starts = [number * size for number in (cp.rank, 2 * cp.size - 1 - cp.rank)]
    bounds = [(max(start, first), min(start + size, total - 1)) for start in starts]
    return [
        (start, low - first, max(low, high) - first)
        for start, (low, high) in zip(starts, bounds, strict=True)
    ]


def slice_log_prob_with_cp(log_prob: Tensor, total_length: int, response_length: int) -> Tensor:
    if get_parallel_state().cp.size == 1:
        return log_prob
    return torch.cat([log_prob[low:high] for _, low, high in zigzag_pieces(total_length, response_length)])


def allgather_cp_redistribute(
    res: dict[str, list[Tensor]],
    *,
    logits: Tensor,
    args: Any,
    total_lengths: list[int],
    response_lengths: list[int],
    max_seq_lens: list[int] | None = None,
) -> None:
    """Where a rank has no token of a sample, its placeholder requires grad."""
    cp, length = get_parallel_state().cp, logits.size(1)
    for key, values in res.items():
        whole, start = [], 0
        for value, total, response in zip(values, total_lengths, response_lengths, strict=True):
            before = min(max(cp.rank * length - (start + total - response - 1), 0), response)
            if len(value) == 0:
                whole.append(torch.zeros(response, dtype=value.dtype, requires_grad=True))
            else:
                whole.append(torch.nn.functional.pad(value, (before, response - before - len(value))))
            start += total
        gathered = torch.distributed.nn.all_reduce(torch.cat(whole), group=cp.group).split(response_lengths)
        samples = zip(gathered, total_lengths, response_lengths, strict=True)
        res[key] = [slice_log_prob_with_cp(*sample) for sample in samples]
