"""Collectives over the ranks that share a vocabulary.

:func:`sum_gradient` and :func:`gather_sequence` do what hidden states of an output layer need that is split
over ranks, as Megatron's ``copy_to_tensor_model_parallel_region`` and
``gather_from_sequence_parallel_region`` do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return ``[tp, k, n]``, the ``[k, n]`` of every rank of the group."""
    if group is None or (size := dist.get_world_size(group)) == 1:
        return values[None]
    gathered = values.new_empty((size * len(values), *values.shape[1:]))
    dist.all_gather_into_tensor(gathered, values, group=group)
    return gathered.view(size, *values.shape)


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
