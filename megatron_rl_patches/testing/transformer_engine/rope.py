"""Rotary embeddings (``apply_rope_fusion``), and which positions of a sequence a rank has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .refusals import check_options, refuse, require


def positions_of(rank: int, size: int, rows: int) -> Tensor:
    """Return the positions of a rank's rows: a piece from either end, as Megatron cuts sequences."""
    if size == 1:
        return torch.arange(rows)
    require((rows % 2 == 0, f"{rows} rows on a rank, which are not two pieces of the same length"))
    pieces = torch.arange(rows * size).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    *,
    interleaved: bool = False,
    cu_seqlens: Any = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    **others: Any,
) -> Tensor:
    """Rotate the first channels of each head by ``freqs``, ``[positions, 1, 1, channels]`` in float32.

    Packed samples (``thd``) start at position 0 each, and ranks have two pieces of each of them. What is not
    ``fused`` is computed in the type of ``t``.
    """
    check_options("apply_rotary_pos_emb", others)
    is_packed = tensor_format == "thd"
    size = len(t) if is_packed else t.shape[tensor_format.find("s")]
    require(
        (tensor_format in ("sbhd", "bshd", "thd"), f"tensor_format is {tensor_format!r}"),
        (not is_packed or cu_seqlens is not None, "packed samples have no cu_seqlens"),
        (is_packed or len(freqs) >= size, f"there are {len(freqs)} positions for {size} rows"),
    )
    if cp_size > 1 and not is_packed:
        refuse("rotary embeddings in context parallelism unless samples are packed")
    if is_packed:
        rows = (cu_seqlens.diff() // cp_size).tolist()
        places = torch.cat([positions_of(cp_rank, cp_size, length) for length in rows])
        # What follows the last sample is padding.
        freqs = freqs[torch.nn.functional.pad(places, (0, size - len(places)))][:, 0]
    else:
        freqs = freqs[:size] if tensor_format == "sbhd" else freqs[:size].transpose(0, 1)
    turned, kept = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
    if interleaved:
        other = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        other = torch.cat((-second, first), -1)
    dtype = torch.float32 if others.get("fused") else t.dtype
    x = turned.to(dtype) * freqs.cos().to(dtype) + other.to(dtype) * freqs.sin().to(dtype)
    return torch.cat((x.to(t.dtype), kept), -1)
