"""In the shape of miles: as slime's, of the groups that the trainer has set."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.nn
from loss_parts import whole_responses, zigzag_part
from torch import Tensor

from .parallel import get_parallel_state


def slice_log_prob_with_cp(log_prob: Tensor, total_length: int, response_length: int) -> Tensor:
    cp = get_parallel_state().cp
    return zigzag_part(log_prob, total_length, response_length, cp.size, cp.rank)


def allgather_cp_redistribute(
    res: dict[str, list[Tensor]],
    *,
    logits: Tensor,
    args: Any,
    total_lengths: list[int],
    response_lengths: list[int],
) -> None:
    cp = get_parallel_state().cp
    first = cp.rank * logits.size(1)
    placeholder = torch.zeros(0, requires_grad=True)
    for key, values in res.items():
        whole = whole_responses(values, placeholder, first, total_lengths, response_lengths)
        gathered = torch.distributed.nn.all_reduce(whole, group=cp.group)
        lengths = zip(gathered.split(response_lengths), total_lengths, response_lengths, strict=True)
        res[key] = [slice_log_prob_with_cp(*sample) for sample in lengths]
