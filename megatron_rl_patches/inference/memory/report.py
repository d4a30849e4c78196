"""An estimate of memory as tables, a sentence and a plot; memory in use now, and by phases, for a log."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import wraps
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import psutil

from ...common.chunks import as_chunks
from ...common.messages import Message, is_rank_0
from ...common.scopes import replaced
from ...reentry.running_calls import copied_gradients
from ...reentry.training_warnings import harmless
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
    for part in (f.name for f in fields(Memory) if f.name != "host"):
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
class MemoryReport:
    """Memory in use, in bytes; ``str()`` is one line.

    Attributes:
        rss: host memory of this process.
        host_available, host_total: of the machine; a container may have less.
        teachers: models in the pool; ``None`` without one.
        teacher_weights: the teachers in host memory.
        teacher_heads: their output layers, by default on the device.
        main_gradients: what a step has left on the main parameters of an ``optimizer``, in float32.
        device: index of the current CUDA device; ``None`` in a process that does not use CUDA.
        allocated, reserved: by torch in this process; its allocator reserves more than tensors take.
        peak_allocated: since the start or the last ``torch.cuda.reset_peak_memory_stats()``.
        device_free, device_total: of all processes.
    """

    rss: int
    host_available: int
    host_total: int
    teachers: int | None = None
    teacher_weights: int = 0
    teacher_heads: int = 0
    main_gradients: int = 0
    device: int | None = None
    allocated: int = 0
    peak_allocated: int = 0
    reserved: int = 0
    device_free: int = 0
    device_total: int = 0

    def __str__(self) -> str:
        gib = {name: f"{size / 2**30:.2f} GiB" for name, size in asdict(self).items() if size is not None}
        line = f"host: {gib['rss']} in this process, {gib['host_available']} of {gib['host_total']} free"
        if self.teachers is not None:
            weights = f"{gib['teacher_weights']} in host memory, output layers {gib['teacher_heads']}"
            line += f"; {self.teachers} teachers: {weights}"
        if self.main_gradients:
            line += f"; gradients on main parameters {gib['main_gradients']}"
        if self.device is not None:
            usage = f"{gib['allocated']} allocated, peak {gib['peak_allocated']}, {gib['reserved']} reserved"
            free = f"{gib['device_free']} of {gib['device_total']} free"
            line = f"cuda:{self.device}: {usage}, {free}; {line}"
        return line


def memory_report(*, pool: TeacherPool | None = None, optimizer: Any = None) -> MemoryReport:
    """Measure the current CUDA device and host memory now, and what ``pool`` and ``optimizer`` hold.

    Starts no collective and takes well under a millisecond. Source of the idea: THUDM/slime#1764.
    """
    from torch import cuda

    machine = psutil.virtual_memory()
    sizes = {"rss": psutil.Process().memory_info().rss}
    sizes |= {"host_available": machine.available, "host_total": machine.total}
    if pool is not None:
        sizes |= {"teachers": len(pool), "teacher_weights": pool.host_bytes, "teacher_heads": pool.head_bytes}
    sizes["main_gradients"] = sum(main.grad.nbytes for main in copied_gradients(optimizer))
    # A call of the driver would create a CUDA context of some hundred MiB in a process without one.
    if cuda.is_available() and cuda.is_initialized():  # type: ignore[no-untyped-call]
        sizes |= {"device": cuda.current_device(), "allocated": cuda.memory_allocated()}
        sizes |= {"peak_allocated": cuda.max_memory_allocated(), "reserved": cuda.memory_reserved()}
        sizes["device_free"], sizes["device_total"] = cuda.mem_get_info()
    return MemoryReport(**sizes)


# --- by phase

_PEAKS = Message(
    "peak memory by phase until {end}, in GiB: {report}",
    "On a CUDA device it is what torch had allocated; rss is host memory where a phase ends.",
    "Lower the largest one; memory_phases=0 ends these lines, and logs=False those of your own block.",
)
_open: list[MemoryPhases] = []  # the blocks that are open in this process
_reset_peaks: dict[int, dict[str, int]] = {}


def reset_peaks(device: Any = None) -> dict[str, int]:
    """Return the largest peaks of ``torch.cuda.memory_stats()`` that phases have reset, by name."""
    from torch.cuda import memory

    device = memory._get_device_index(device, optional=True)  # type: ignore[attr-defined]
    return _reset_peaks.setdefault(device, {})


@dataclass(eq=False)
class MemoryPhases:
    """Measures peak memory in a block by phase; a line of the log has it as JSON, also if the block raises.

    A forward pass of ``model``, which is a chunk or several, is the phase ``forward``. What follows until the
    next pass or step is ``loss and backward``, with recomputation. Without grad mode, both are ``scoring``.
    ``optimizer.step()`` is ``step``, a block ``with phases("save"):`` is ``save``, and all else is ``name``.
    ``phases.peaks`` has bytes by phase. Without CUDA, they are resident memory where a phase ended.

    Phases reset torch's peak statistics, which the option ``memory_phases`` hides from others. No collective
    runs. Global rank 0 ``logs`` its numbers, and each rank that raises. Source: THUDM/slime#2304.
    """

    model: Any = None
    optimizer: Any = None
    name: str = "other"
    logs: bool = True
    peaks: dict[str, int] = field(default_factory=dict)
    _source: str | None = field(default=None, init=False)

    def __enter__(self) -> MemoryPhases:
        self.phase = self.name
        self._begin(self.name)
        with ExitStack() as stack:
            for chunk in as_chunks(self.model):
                if hasattr(chunk, "register_forward_pre_hook"):
                    stack.callback(chunk.register_forward_pre_hook(self._before_forward).remove)
                    stack.callback(chunk.register_forward_hook(self._after_forward).remove)
            if inspect.isroutine(step := getattr(self.optimizer, "step", None)):  # not that of a mock
                measured = wraps(step)(lambda _, *args, **kwargs: self("step")(step)(*args, **kwargs))
                method = MethodType(measured, self.optimizer)  # schedulers of torch expect one
                stack.enter_context(replaced(self.optimizer, step=method))
            self._exit = stack.pop_all()
        _open.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        self._exit.close()
        self._begin(self.phase)
        _open.remove(self)
        if kind is not None or (self.logs and is_rank_0()):
            gib = {name: round(peak / 2**30, 3) for name, peak in self.peaks.items()}
            end = f"{kind.__name__} in {self.phase!r}" if kind else "the end"
            _PEAKS.log(end=end, report=json.dumps({"measured": self._source, **gib}))

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Make the block a phase. If the block raises, the phase lasts until another one begins."""
        self._begin(name)
        yield
        self._begin(self.name)

    def _before_forward(self, *_: object) -> None:
        import torch

        if torch._C._current_graph_task_id() == -1:  # backward does not recompute
            self._begin("forward" if torch.is_grad_enabled() else "scoring")

    def _after_forward(self, *_: object) -> None:
        if self.phase == "forward":
            self._begin("loss and backward")

    def _begin(self, phase: str) -> None:
        """Add the peak of the phase that ends to all open blocks."""
        with harmless():
            from torch import cuda

            if stats := inspect.unwrap(cuda.memory_stats)():  # torch's own
                self._source, peak = f"cuda:{cuda.current_device()}", stats["allocated_bytes.all.peak"]
                peaks = reset_peaks()
                peaks |= {n: max(size, peaks.get(n, 0)) for n, size in stats.items() if ".peak" in n}
                inspect.unwrap(cuda.reset_peak_memory_stats)()
            else:  # this process uses no GPU
                self._source, peak = "rss", psutil.Process().memory_info().rss
            for block in _open:
                block.peaks[block.phase] = max(block.peaks.get(block.phase, 0), peak)
        self.phase = phase
