"""Permutation of tokens (``moe_permute_fusion``), after which rows of the same expert lie together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .refusals import check_options, refuse, require


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: Any = -1, **others: Any
) -> tuple[Tensor, Tensor]:
    """Return a row for each token of each expert, and a map: of which expert and which token each row is."""
    check_options("moe_permute", others)
    require((len(inp) == len(routing_map), f"there are {len(inp)} tokens, and routes of {len(routing_map)}"))
    routes = int(routing_map.sum())
    if num_out_tokens != routes and inp.numel():  # the kernel would write past its output, or leave it unset
        refuse(f"num_out_tokens={num_out_tokens} for {routes} routes")
    row_map = routing_map.t().nonzero()
    return inp[row_map[:, 1]], row_map


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: Any = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of ``moe_permute``, the probability of each, and the map."""
    rows, row_map = moe_permute(inp, routing_map, num_out_tokens)
    return rows, probs.t()[tuple(row_map.t())], row_map


def moe_unpermute(
    inp: Tensor, row_id_map: Tensor, merging_probs: Any = None, restore_shape: Any = None, **others: Any
) -> Tensor:
    """Sum the rows of each token in float32, times their probabilities if there are any."""
    check_options("moe_unpermute", others)
    experts, tokens = row_id_map.unbind(1)
    rows = inp.float()
    if merging_probs is not None:
        rows = rows * merging_probs[tokens, experts, None].float()
    shape = inp.shape if restore_shape is None else restore_shape
    return rows.new_zeros(shape).index_add(0, tokens, rows).to(inp.dtype)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Cut rows into chunks and put these into another order."""
    require((len(split_sizes) == len(sorted_index), "split_sizes and sorted_index differ in length"))
    chunks = torch.split(inp, split_sizes.tolist())
    return torch.cat([chunks[index] for index in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """Do the same with the rows and with their probabilities."""
    order = split_sizes, sorted_index
    return moe_sort_chunks_by_index(inp, *order), moe_sort_chunks_by_index(probs, *order)
