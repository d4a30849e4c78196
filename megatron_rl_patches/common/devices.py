"""Copies of tensors between a GPU and host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

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


def each_prefetched(tensors: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yield tensors ``[any, h]`` on the device, each until the next one is asked for.

    A GPU copies the next one from pinned host memory while it computes with this one. At most two of
    them are on the device at a time. The CPU waits for copies from other host memory.
    """
    if tensors[0].device.type != "cpu" or device.type != "cuda":
        yield from (tensor.to(device) for tensor in tensors)
        return
    current, side = torch.cuda.current_stream(device), _copying_stream(device)
    buffers = [torch.empty_like(max(tensors, key=len), device=device) for _ in tensors[:2]]

    def fetch(number: int) -> Tensor:
        side.wait_stream(current)  # which has computed with what is in this buffer
        with torch.cuda.stream(side):
            part = buffers[number % 2][: len(tensors[number])]
            return part.copy_(tensors[number], non_blocking=True)

    try:
        following = fetch(0)
        for number in range(1, len(tensors) + 1):
            fetched = following
            current.wait_stream(side)
            if number < len(tensors):
                following = fetch(number)
            yield fetched
    finally:
        current.wait_stream(side)  # before others get the memory of the buffers


@cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all copies, since torch's allocator keeps memory for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def copied_to(tensor: Tensor, device: torch.device | str, *, non_blocking: bool = False) -> Tensor:
    """Return a copy without a graph on the device; what comes from a GPU goes to pinned host memory.

    With ``non_blocking`` such a copy is complete when the current CUDA stream has been waited for.
    """
    tensor = tensor.detach()
    if not tensor.is_cuda or torch.device(device).type != "cpu":
        return tensor.to(device, copy=True)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=non_blocking)


def copied_together(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Return copies in one block of memory, by one :func:`copied_to` that does not wait for a GPU."""
    aligned = sorted(tensors, key=Tensor.element_size, reverse=True)
    whole = torch.cat([tensor.detach().flatten().view(torch.uint8) for tensor in aligned])
    if whole.device != torch.device(device):
        whole = copied_to(whole, device, non_blocking=True)
    parts = torch.split(whole, [tensor.nbytes for tensor in aligned])
    copies = {id(x): part.view(x.dtype).view(x.shape) for x, part in zip(aligned, parts, strict=True)}
    return [copies[id(tensor)] for tensor in tensors]
