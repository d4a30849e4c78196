"""Communication of tensor parallel layers, with its gradients. Sequences lie along the first dimension."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _all_gather(x: Tensor, group: Any) -> Tensor:
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _reduce_scatter(x: Tensor, group: Any) -> Tensor:
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def _all_reduce(x: Tensor, group: Any) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _same(x: Tensor, group: Any) -> Tensor:
    return x.view_as(x)


class _Communication(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, forward: Any, backward: Any) -> Tensor:
        ctx.backward_of, ctx.group = backward, group
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.backward_of(grad, ctx.group), None, None, None


def enter_column(x: Tensor, group: Any, sequence_parallel: bool) -> Tensor:
    """Return the input of a column parallel product from a rank's part of the sequence, or from all of it."""
    pair = (_all_gather, _reduce_scatter) if sequence_parallel else (_same, _all_reduce)
    return _Communication.apply(x, group, *pair)  # type: ignore[no-untyped-call]


def leave_row(x: Tensor, group: Any, sequence_parallel: bool) -> Tensor:
    """Sum the row parallel products of all ranks; return a rank's part of the sequence, or all of it."""
    pair = (_reduce_scatter, _all_gather) if sequence_parallel else (_all_reduce, _same)
    return _Communication.apply(x, group, *pair)  # type: ignore[no-untyped-call]
