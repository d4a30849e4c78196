"""Where the responses of a microbatch of slime, OpenClaw-RL or miles stand in the logits of this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..losses.sequences import SequenceLayout


class Groups(NamedTuple):
    """The context parallel and tensor parallel groups of a loss."""

    cp_rank: int
    cp_size: int
    cp_group: dist.ProcessGroup | None
    tp_group: dist.ProcessGroup | None


def groups_of(function: Callable[..., Any] | None = None) -> Groups:
    """Return Megatron's groups, or those that a function of miles asks for, which differ under FSDP."""
    if (own := getattr(function, "__globals__", {}).get("get_parallel_state")) is not None:
        cp, tp = own().cp, own().tp
        return Groups(cp.rank, cp.size, cp.group, tp.group)
    from megatron.core import parallel_state as state

    return Groups(
        state.get_context_parallel_rank(),
        state.get_context_parallel_world_size(),
        state.get_context_parallel_group(),
        state.get_tensor_model_parallel_group(),
    )


def layout_of(
    args: Any, batch: Mapping[str, Any], groups: Groups, num_rows: int | None, device: torch.device
) -> SequenceLayout:
    """Return the layout of a batch in packed logits of so many rows; ``None``: the fewest that hold it."""
    qkv_format = getattr(args, "qkv_format", None) or "thd"
    is_padded = qkv_format == "bshd"
    return SequenceLayout.build(
        batch["total_lengths"],
        batch["response_lengths"],
        qkv_format=qkv_format,
        max_seq_lens=batch.get("max_seq_lens") if is_padded else None,
        num_rows=None if is_padded else num_rows,
        cp_rank=groups.cp_rank,
        cp_size=groups.cp_size,
        device=device,
    )
