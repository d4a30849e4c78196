"""An estimate of memory as tables, a sentence and a plot, and the memory in use now as a line for a log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from .estimate import Memory, MemoryEstimate, StageEstimate

if TYPE_CHECKING:
    from ..teachers import TeacherPool

_DECIMAL, _BINARY = ("B", "kB", "MB", "GB"), ("B", "KiB", "MiB", "GiB")
_Table = list[tuple[str, ...]]


def uses(estimate: MemoryEstimate, stage: StageEstimate) -> dict[str, Memory]:
    """Return the memory of a stage by what a rank does."""
    memories = {"training": stage.training, "inference-only": stage.inference_only}
    if estimate.teachers:
        name = f"training + {estimate.teachers} teacher{'s' * (estimate.teachers > 1)}"
        memories[name] = stage.with_teachers
    return memories


def rows(estimate: MemoryEstimate) -> _Table:
    """Return a header, and what the stage that takes most holds: a row for each part, a column for each use.

    Units are decimal (1 GB is 10⁹ bytes); the sum is also given in the binary one (1 GiB is 2³⁰ bytes).
    """
    memories = uses(estimate, estimate.worst)
    power = _power(memory.total for memory in memories.values())
    parts = {f.name: [getattr(memory, f.name) for memory in memories.values()] for f in fields(Memory)}
    host, totals = parts.pop("host"), [memory.total for memory in memories.values()]
    table = [(_DECIMAL[power], *memories)]
    table += [_row(name.replace("_", " "), x, 1000**power) for name, x in parts.items() if any(x)]
    table += [_row("total", totals, 1000**power), _row(f"total in {_BINARY[power]}", totals, 1024**power)]
    if any(host):
        table.append(_row("host memory", host, 1000**power))
    return table


def totals(estimate: MemoryEstimate) -> _Table:
    """Return a header, and the sum of each use for each pipeline stage."""
    stages = [uses(estimate, stage) for stage in estimate.stages]
    power = _power(memory.total for stage in stages for memory in stage.values())
    header = (f"stage, in {_DECIMAL[power]}", *stages[0])
    return [header, *(_row(str(i), [m.total for m in s.values()], 1000**power) for i, s in enumerate(stages))]


def summary(estimate: MemoryEstimate) -> str:
    """Return one sentence on the stage that takes most."""
    stage = estimate.worst
    training, inference = stage.training.total, stage.inference_only.total
    return (
        f"stage {estimate.stages.index(stage)} takes most: {size(training)} per device for training, "
        f"{size(inference)} inference-only ({1 - inference / training:.1%} less); activations not counted"
    )


def size(number: int) -> str:
    """Return bytes in both kinds of units: ``54.02 GB (50.31 GiB)``."""
    power = _power([number])
    return f"{number / 1000**power:.2f} {_DECIMAL[power]} ({number / 1024**power:.2f} {_BINARY[power]})"


def plot(estimate: MemoryEstimate, path: Path) -> None:
    """Draw stacked bars for the stage that takes most; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    memories = uses(estimate, estimate.worst)
    power = _power(memory.total for memory in memories.values())
    labels = [use.replace(" + ", "\n+ ") for use in memories]
    bottoms = [0.0] * len(memories)
    for part in (field.name for field in fields(Memory) if field.name != "host"):
        heights = [getattr(memory, part) / 1000**power for memory in memories.values()]
        if any(heights):
            axes.bar(labels, heights, bottom=bottoms, label=part.replace("_", " "), width=0.6)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for index, total in enumerate(bottoms):
        axes.annotate(f"{total:.1f}", (index, total), ha="center", va="bottom")
    axes.set(ylabel=f"{_DECIMAL[power]} per device", ymargin=0.1)
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=150)


def _row(name: str, sizes: Sequence[int], unit: int) -> tuple[str, ...]:
    return (name, *(f"{size / unit:.2f}" if size else "-" for size in sizes))


def _power(sizes: Iterable[int]) -> int:
    """Return the power of 1000 that leaves the largest size up to four digits before the point."""
    return min(int(math.log(max(*sizes, 1), 1000)), len(_DECIMAL) - 1)


# --- measured


@dataclass(frozen=True)
class DeviceMemory:
    """One CUDA device, in bytes: ``free`` and ``total`` of all processes, the others of this process.

    ``reserved`` is what torch's allocator holds, tensors included. ``peak_allocated`` is the most since the
    start or the last ``torch.cuda.reset_peak_memory_stats()``.
    """

    index: int
    allocated: int
    peak_allocated: int
    reserved: int
    free: int
    total: int


@dataclass(frozen=True)
class HostMemory:
    """Host memory in bytes: ``rss`` of this process, the others of the machine; a container may have less."""

    rss: int
    available: int
    total: int


@dataclass(frozen=True)
class TeacherMemory:
    """A :class:`.TeacherPool`: bytes in host memory, and of output layers, by default on the device."""

    count: int
    weights: int
    heads: int


@dataclass(frozen=True)
class MemoryReport:
    """Device memory (``None`` in a process that does not use CUDA) and host memory; ``str()`` is one line."""

    device: DeviceMemory | None
    host: HostMemory
    teachers: TeacherMemory | None = None

    def __str__(self) -> str:
        rss, available, total = map(_gib, astuple(self.host))
        line = f"host: {rss} in this process, {available} of {total} free"
        if self.teachers is not None:
            weights, heads = _gib(self.teachers.weights), _gib(self.teachers.heads)
            line += f"; {self.teachers.count} teachers: {weights} in host memory, output layers {heads}"
        if self.device is not None:
            allocated, peak, reserved, free, total = map(_gib, astuple(self.device)[1:])
            usage = f"{allocated} allocated, peak {peak}, {reserved} reserved, {free} of {total} free"
            line = f"cuda:{self.device.index}: {usage}; {line}"
        return line


def memory_report(*, pool: TeacherPool | None = None) -> MemoryReport:
    """Measure the current CUDA device and host memory now, and what a ``pool`` of teachers holds.

    Starts no collective and takes well under a millisecond. Source of the idea: THUDM/slime#1764.
    """
    import torch

    teachers = None if pool is None else TeacherMemory(len(pool), pool.host_bytes, pool.head_bytes)
    machine = psutil.virtual_memory()
    host = HostMemory(psutil.Process().memory_info().rss, machine.available, machine.total)
    # A call of the driver would create a CUDA context of some hundred MiB in a process without one.
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return MemoryReport(None, host, teachers)
    cuda = torch.cuda
    allocated, peak, reserved = cuda.memory_allocated(), cuda.max_memory_allocated(), cuda.memory_reserved()
    device = DeviceMemory(cuda.current_device(), allocated, peak, reserved, *cuda.mem_get_info())
    return MemoryReport(device, host, teachers)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
