"""What the device and the host have in use, for logs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch


@dataclass(frozen=True)
class DeviceMemory:
    """One CUDA device, in bytes. ``free`` and ``total`` are the driver's and count all processes.

    Attributes:
        index: of the device within this process.
        allocated: tensors of this process.
        peak_allocated: the most that was allocated since the start or the last
            ``torch.cuda.reset_peak_memory_stats()``.
        reserved: what torch's allocator holds, tensors included.
    """

    index: int
    allocated: int
    peak_allocated: int
    reserved: int
    free: int
    total: int


@dataclass(frozen=True)
class HostMemory:
    """Host memory, in bytes.

    Attributes:
        rss: resident memory of this process; pages that processes share count in each of them.
        available: what the machine can give out without swapping, as the kernel sees it.
        total: of the machine. A container's limit may be lower; neither number knows of it.
    """

    rss: int
    available: int
    total: int


@dataclass(frozen=True)
class MemoryReport:
    """Both; ``device`` is None in a process that does not use CUDA. ``str()`` is one line."""

    device: DeviceMemory | None
    host: HostMemory

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        device, host = self.device, self.host
        on_host = f"host: {_gib(host.rss)} in this process, {_gib(host.available)} of {_gib(host.total)} free"
        if device is None:
            return on_host
        return (
            f"cuda:{device.index}: {_gib(device.allocated)} allocated, peak {_gib(device.peak_allocated)}, "
            f"{_gib(device.reserved)} reserved, {_gib(device.free)} of {_gib(device.total)} free; {on_host}"
        )


def memory_report(device: int | None = None) -> MemoryReport:
    """Measure device and host memory now. Takes well under a millisecond and starts no collective.

    Device and host together, as in THUDM/slime#1764: teachers that wait in host memory are killed by the
    kernel, not by CUDA.

    Args:
        device: index of a CUDA device; by default the current one.
    """
    return MemoryReport(_device_memory(device), _host_memory())


def _device_memory(device: int | None) -> DeviceMemory | None:
    # Asking the driver would create a context, of some hundred MiB, in a process that has none.
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return None
    index = torch.cuda.current_device() if device is None else device
    free, total = torch.cuda.mem_get_info(index)
    return DeviceMemory(
        index=index,
        allocated=torch.cuda.memory_allocated(index),
        peak_allocated=torch.cuda.max_memory_allocated(index),
        reserved=torch.cuda.memory_reserved(index),
        free=free,
        total=total,
    )


def _host_memory() -> HostMemory:
    machine = psutil.virtual_memory()
    return HostMemory(
        rss=psutil.Process().memory_info().rss, available=machine.available, total=machine.total
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
