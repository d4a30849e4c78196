"""Rotary embeddings (``apply_rope_fusion``), and which positions of a sequence a rank has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .refusals import refuse


def positions_of(rank: int, size: int, rows: int) -> Tensor:
    """Return the positions of a rank's rows: a piece from either end, as Megatron cuts sequences."""
    if size == 1:
        return torch.arange(rows)
    if rows % 2:
        raise AssertionError(f"{rows} rows on a rank; expected two pieces of the same length")
    pieces = torch.arange(rows * size).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    cu_seqlens: Any = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleaved: bool = False,
    **options: Any,
) -> Tensor:
    """Rotate the first channels of each head by ``freqs``, ``[positions, 1, 1, channels]`` in float32.

    Packed samples (``thd``) start at position 0 each, and ranks have two pieces of each of them.
    """
    if options.get("start_positions") is not None:
        refuse("start_positions of rotary embeddings")
    if tensor_format == "thd":
        rows = (cu_seqlens.diff() // cp_size).tolist()
        places = torch.cat([positions_of(cp_rank, cp_size, length) for length in rows])
        # What follows the last sample is padding.
        places = torch.nn.functional.pad(places, (0, len(t) - len(places)))
        return _rotated(t, freqs[places][:, 0], interleaved)
    freqs = freqs[: t.shape[tensor_format.index("s")]]
    return _rotated(t, freqs if tensor_format == "sbhd" else freqs.transpose(0, 1), interleaved)


def _rotated(t: Tensor, freqs: Tensor, interleaved: bool) -> Tensor:
    turned, kept = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
    if interleaved:
        other = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        other = torch.cat((-second, first), -1)
    x = turned.float() * freqs.cos() + other.float() * freqs.sin()
    return torch.cat((x.to(t.dtype), kept), -1)
