"""Hidden states of an output layer that is split over ranks: what they need in forward and in backward.

The same as Megatron's ``copy_to_tensor_model_parallel_region`` and ``gather_from_sequence_parallel_region``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def sum_gradient(hidden: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the hidden states; their gradient is summed over the group."""
    if group is None or dist.get_world_size(group) == 1:
        return hidden
    return _SumGradient.apply(hidden, group)  # type: ignore[no-untyped-call]


def gather_sequence(hidden: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return ``[s, ..., h]`` of all ranks' ``[s / tp, ..., h]``; the gradient is summed and scattered."""
    if group is None or dist.get_world_size(group) == 1:
        return hidden
    return _GatherSequence.apply(hidden, group)  # type: ignore[no-untyped-call]


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        size = dist.get_world_size(group)
        whole = hidden.new_empty((size * len(hidden), *hidden.shape[1:]))
        dist.all_gather_into_tensor(whole, hidden.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        size = dist.get_world_size(ctx.group)
        part = gradient.new_empty((len(gradient) // size, *gradient.shape[1:]))
        dist.reduce_scatter_tensor(part, gradient.contiguous(), group=ctx.group)
        return part, None
