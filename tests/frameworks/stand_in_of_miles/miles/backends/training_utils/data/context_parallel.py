"""In the shape of miles since September 2026: which rows of a sample a context-parallel rank has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.nn
from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp
from torch import Tensor

from ..parallel import get_parallel_state


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
        res[key] = [*map(slice_log_prob_with_cp, gathered, total_lengths, response_lengths)]
