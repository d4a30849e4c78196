"""Copies of tensors between a GPU and host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return the tensor on the device; from host memory it is copied to a GPU without waiting for it.

    A tensor that is in pinned memory already must not be overwritten before the copy has ended.
    """
    if tensor.device.type != "cpu" or torch.device(device).type != "cuda":
        return tensor.to(device)
    # torch cannot pin a tensor whose elements share memory, as those of expand() do.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def each_on_device(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Return tensors that may differ in length on the device, by one copy for all of them."""
    return list(torch.split(on_device(torch.cat(list(tensors)), device), list(map(len, tensors))))


def copied_to(tensor: Tensor, device: torch.device | str, *, non_blocking: bool = False) -> Tensor:
    """Return a copy without a graph on the device; what comes from a GPU goes to pinned host memory.

    With ``non_blocking`` such a copy is complete when the current CUDA stream has been waited for.
    """
    tensor = tensor.detach()
    if not tensor.is_cuda or torch.device(device).type != "cpu":
        return tensor.to(device, copy=True)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=non_blocking)
