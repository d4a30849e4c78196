"""What calls cost that take turns: time, bytes at the peak, and on a GPU their kernels."""

from __future__ import annotations

import gc
import math
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined, unused-ignore]
from torch.profiler import ProfilerActivity, profile

from megatron_rl_patches.testing import spawn_ranks
from tests.references.live_bytes import peak_bytes

from .page import Table, number

#: Known from the start, since ``cpu_backend`` later makes torch say that there is a GPU.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
TURNS, MIN_TURNS = 5, 3
# About two milliseconds, which a call needs for its first kernels.
BUSY_CYCLES = 4_000_000
COPY = "copy"
# Freed memory stays with the process: else a CPU run measures page faults.
WARM_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 28)}
FEW_FAULTS = 1000  # pages of 4 KiB


@dataclass(frozen=True)
class Call:
    """A call to be measured.

    Attributes:
        run: called with what ``prepare`` returned, which is not measured.
        least_bytes: bytes that any way to the same results has to read and to write.
        results_bytes: bytes of results that every way has, which are no part of the peak.
        details: returns other numbers about the call, such as errors. It is called once, before all else.
    """

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None
    least_bytes: int = 0
    results_bytes: int = 0
    details: Callable[[], tuple[float, ...]] = lambda: ()


@dataclass(frozen=True)
class Cost:
    """What a call costs.

    Attributes:
        milliseconds: median of the turns; not a number if there were none.
        peak_bytes: allocated at once, beyond what was allocated before and beyond the results.
        kernels: how many kernels (on the CPU, operators) it starts, where it was profiled.
        by_kernel: how often each kernel ran, and its milliseconds in all, by its name.
        share_of_copy: the least bytes per second, over the bytes per second that a copy reads and writes.
    """

    milliseconds: float
    peak_bytes: int
    details: tuple[float, ...] = ()
    kernels: int = 0
    by_kernel: dict[str, tuple[int, float]] = field(default_factory=dict)
    share_of_copy: float = 0.0


@dataclass
class Result:
    """What the calls of one set-up cost.

    Attributes:
        setup: has ``logits_bytes``, if memory is to be counted in them.
        unit: the name of the call whose time is the unit of the others'.
        costs: by mode, which is what the calls do, and name, which is how they do it.
        left_out: name -> why it was not measured.
    """

    setup: Any = None
    unit: str = COPY
    costs: dict[str, dict[str, Cost]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def cost(self, mode: str, name: str) -> Cost | None:
        return self.costs.get(mode, {}).get(name)

    def memory(self, mode: str, name: str) -> float:
        """Return the bytes at the peak in those of the logits; not a number without a cost."""
        cost = self.cost(mode, name)
        return cost.peak_bytes / self.setup.logits_bytes if cost else math.nan

    def duration(self, mode: str, name: str) -> float:
        """Return the time in that of the unit; not a number without a cost."""
        cost, unit = self.cost(mode, name), self.cost(mode, self.unit)
        return cost.milliseconds / unit.milliseconds if cost and unit else math.nan

    def measure(
        self,
        mode: str,
        calls: Mapping[str, Call],
        turns: int = TURNS,
        seconds: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Measure calls that take turns. Turns with page faults do not count, if there are others.

        Args:
            turns: how often each call is timed; all ranks must agree on it. With 0, memory alone is measured.
            seconds: after which no turn begins that is not one of the first three.
            clock: wall-clock or CPU time, for calls on the CPU.
        """
        peaks: dict[str, int] = {}
        details: dict[str, tuple[float, ...]] = {}
        for name, call in calls.items():
            try:
                details[name] = call.details()
                call.run(call.prepare())  # compiles
                peaks[name] = peak_bytes(partial(call.run, call.prepare()), ON_GPU) - call.results_bytes
            except Exception as error:  # out of memory, or a kernel for another GPU
                self.left_out[name] = why(error)
            gc.collect()
            if ON_GPU:
                torch.cuda.empty_cache()
        times: dict[str, list[tuple[float, int]]] = {name: [] for name in peaks}
        end = time.perf_counter() + seconds
        for turn in range(turns):
            if turn >= MIN_TURNS and time.perf_counter() > end:
                break
            for name in peaks:
                times[name].append(_time(calls[name], clock))
        for name, peak in peaks.items():
            undisturbed = [milliseconds for milliseconds, faults in times[name] if faults <= FEW_FAULTS]
            milliseconds = statistics.median(undisturbed or [t for t, _ in times[name]] or [math.nan])
            self.costs.setdefault(mode, {})[name] = Cost(milliseconds, peak, details[name])


def on_ranks(
    function: Callable[[Any, int], Result], setups: Iterable[Any], turns: int = TURNS
) -> list[Result]:
    """Call the function with each set-up on its ranks, which have one thread each.

    Returns:
        For each set-up, the result of the slowest rank.
    """

    def milliseconds(result: Result) -> float:
        return sum(cost.milliseconds for costs in result.costs.values() for cost in costs.values())

    results = []
    for setup in setups:
        ranks = getattr(setup, "tp_size", 1)
        of_ranks = spawn_ranks(function, ranks, setup, turns, timeout=3600, env=WARM_HEAP)
        results.append(max(of_ranks, key=milliseconds))
    return results


def rows(
    results: Iterable[Result],
    mode_title: str,
    way_title: str,
    details: Mapping[str, str] = MappingProxyType({}),
) -> Table:
    """Return all costs, a row for each way of each mode of each set-up.

    Args:
        details: titles and formats of the calls' other numbers.
    """

    def row(result: Result, mode: str, way: str, cost: Cost) -> dict[str, str]:
        others = zip(details.items(), cost.details, strict=False)
        return {
            "set-up": str(result.setup),
            mode_title: mode,
            way_title: way,
            "memory": f"{result.memory(mode, way):.3f}",
            "MiB": f"{cost.peak_bytes / (1 << 20):.1f}",
            "time": number(result.duration(mode, way), ".2f"),
            "ms": number(cost.milliseconds, ".1f"),
            **{title: number(value, form) for (title, form), value in others},
        }

    costs = ((result, mode, of_mode) for result in results for mode, of_mode in result.costs.items())
    return Table(3, [row(result, mode, *pair) for result, mode, of_mode in costs for pair in of_mode.items()])


def left_out(results: Iterable[Result]) -> Table:
    """Return a row for each way that was not measured, with the reason."""
    pairs = ((result, *pair) for result in results for pair in result.left_out.items())
    return Table(2, [{"set-up": str(r.setup), "left out": way, "why": reason} for r, way, reason in pairs])


def why(error: Exception) -> str:
    """Return one line that says why something is not measured."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"not installed: {error.name}"
    return (str(error).splitlines() or [""])[0][:120] or type(error).__name__


def largest_error(measured: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    expected = expected.detach().to(measured.device)
    return ((measured.detach().double() - expected).abs().max() / expected.abs().max()).item()


def added(
    bare: Callable[[], float], changed: Callable[[], float], pairs: int
) -> tuple[list[float], list[float]]:
    """Measure pairs, one after the other and in alternating order, so that a busy machine slows down both.

    Returns:
        What ``bare`` returned, and how much more ``changed`` did, of each pair.
    """
    befores, differences = [], []
    for pair in range(pairs):
        if pair % 2:
            before, after = bare(), changed()
        else:
            after, before = changed(), bare()
        befores.append(before)
        differences.append(after - before)
    return befores, differences


def kernels(call: Call) -> tuple[int, dict[str, tuple[int, float]]]:
    """Return how many kernels (on the CPU, operators) a call starts; of each name, how many and how long."""
    prepared = call.prepare()
    _synchronize()
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * ON_GPU]) as profiled:
        result = call.run(prepared)
        _synchronize()
    del result
    totals: dict[str, tuple[int, float]] = {}
    for event in profiled.events() or ():
        # Regions that have a name lie over the kernels, and would count them twice.
        is_kernel = event.device_type == DeviceType.CUDA and not event.is_user_annotation
        if is_kernel if ON_GPU else not event.cpu_children:
            number, milliseconds = totals.get(event.name, (0, 0.0))
            totals[event.name] = number + 1, milliseconds + event.time_range.elapsed_us() / 1e3
    return sum(number for number, _ in totals.values()), totals


def _time(call: Call, clock: Callable[[], float]) -> tuple[float, int]:
    """Return the milliseconds of a call that all ranks begin together, and its page faults."""
    prepared = call.prepare()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    _synchronize()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    if ON_GPU:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        # While the device is busy, the call's first kernels are there when the timing begins.
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        call.run(prepared)
        end.record()
        end.synchronize()
        milliseconds = float(begin.elapsed_time(end))
    else:
        start = clock()
        call.run(prepared)
        milliseconds = 1e3 * (clock() - start)
    return milliseconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults


def _synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()
