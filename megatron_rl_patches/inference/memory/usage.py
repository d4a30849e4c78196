"""Device and host memory in use now, as one line for a log."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch

if TYPE_CHECKING:
    from ..teachers import TeacherPool


@dataclass(frozen=True)
class DeviceMemory:
    """One CUDA device, in bytes. ``free`` and ``total`` are the driver's and count all processes.

    Attributes:
        index: of the device within this process.
        allocated: tensors of this process.
        peak_allocated: the most since the start or the last ``torch.cuda.reset_peak_memory_stats()``.
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
class TeacherMemory:
    """What a :class:`.TeacherPool` holds on this rank, in bytes.

    Attributes:
        count: number of teachers.
        weights: their weights in host memory.
        heads: the output layers that it keeps, on the device unless asked for elsewhere.
    """

    count: int
    weights: int
    heads: int


@dataclass(frozen=True)
class MemoryReport:
    """Device memory (``None`` in a process that does not use CUDA) and host memory; ``str()`` is one line."""

    device: DeviceMemory | None
    host: HostMemory
    teachers: TeacherMemory | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return nested dicts, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rss, available, total = map(_gib, asdict(self.host).values())
        host_text = f"host: {rss} in this process, {available} of {total} free"
        if self.teachers is not None:
            weights, heads = _gib(self.teachers.weights), _gib(self.teachers.heads)
            host_text += f"; {self.teachers.count} teachers: {weights} in host memory, output layers {heads}"
        if self.device is None:
            return host_text
        index, *sizes = asdict(self.device).values()
        allocated, peak, reserved, free, total = map(_gib, sizes)
        return (
            f"cuda:{index}: {allocated} allocated, peak {peak}, {reserved} reserved, "
            f"{free} of {total} free; {host_text}"
        )


def memory_report(device: int | None = None, *, pool: TeacherPool | None = None) -> MemoryReport:
    """Measure device and host memory now. Takes well under a millisecond and starts no collective.

    Host memory is covered (THUDM/slime#1764), as the kernel kills a process with too many teachers there.
    ``device`` is the index of a CUDA device; by default the current one. Of a ``pool`` of teachers the report
    says what it holds.
    """
    teachers = None if pool is None else TeacherMemory(len(pool), pool.host_bytes, pool.head_bytes)
    machine = psutil.virtual_memory()
    host = HostMemory(psutil.Process().memory_info().rss, machine.available, machine.total)
    # A call of the driver would create a CUDA context of some hundred MiB in a process without one.
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return MemoryReport(None, host, teachers)
    index = torch.cuda.current_device() if device is None else device
    allocated, peak = torch.cuda.memory_allocated(index), torch.cuda.max_memory_allocated(index)
    sizes = allocated, peak, torch.cuda.memory_reserved(index), *torch.cuda.mem_get_info(index)
    return MemoryReport(DeviceMemory(index, *sizes), host, teachers)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
