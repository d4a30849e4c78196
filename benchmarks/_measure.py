"""What calls cost that take turns: milliseconds, allocator peak, kernels, and bandwidth beside a copy.

On a GPU, CUDA events give the time, the CUDA allocator the peak and the profiler the kernels. On the CPU the
same figures come from the clock, from torch's allocator and from the operators; they only show that the
measurement works.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined, unused-ignore]
from torch.profiler import ProfilerActivity, profile

from tests.unit.losses.live_bytes import live_bytes

LONGEST = 3
MIN_TURNS, MAX_TURNS = 3, 50
COPY = "copy"


@dataclass(frozen=True)
class Call:
    """A call to be measured.

    Attributes:
        run: called with what ``prepare`` returned, which is not measured.
        least_bytes: bytes that any way to the same results has to read and to write.
        results_bytes: bytes of results that every way has, which are no part of the peak.
    """

    run: Callable[[Any], object]
    least_bytes: int
    prepare: Callable[[], Any] = lambda: None
    results_bytes: int = 0


@dataclass(frozen=True)
class Cost:
    """What a call costs.

    Attributes:
        peak_bytes: allocated at once, beyond what was allocated before and beyond the results.
        kernels: how many kernels (on the CPU, operators) it starts.
        longest: those that take most time together, with their milliseconds.
        share_of_copy: the least bytes per second, over the bytes per second that a copy reads and writes.
    """

    milliseconds: float
    peak_bytes: int
    kernels: int
    longest: dict[str, float]
    share_of_copy: float


def measure(
    calls: Mapping[str, Call], seconds: float, device: torch.device
) -> tuple[dict[str, Cost], dict[str, str]]:
    """Return what each call costs, and why others could not be measured.

    Args:
        seconds: for all calls together, besides warming up and profiling.
    """
    size = (1 << 30) if device.type == "cuda" else (1 << 24)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ready = {COPY: Call(lambda _: target.copy_(source), 2 * size), **calls}
    peaks: dict[str, int] = {}
    kernels: dict[str, tuple[int, dict[str, float]]] = {}
    left_out: dict[str, str] = {}
    for name, call in list(ready.items()):
        try:
            call.run(call.prepare())  # compiles
            peaks[name] = _peak(call, device) - call.results_bytes
            kernels[name] = _kernels(call, device)
        except Exception as error:  # out of memory, or a kernel for another GPU
            left_out[name] = why(error)
            del ready[name]
        _collect(device)
    if COPY in left_out:
        raise RuntimeError(f"not even a copy can be measured: {left_out[COPY]}")
    times: dict[str, list[float]] = {name: [] for name in ready}
    end = time.perf_counter() + seconds
    for turn in range(MAX_TURNS):
        if turn >= MIN_TURNS and time.perf_counter() > end:
            break
        for name, call in ready.items():
            times[name].append(_milliseconds(call, device))
    milliseconds = {name: statistics.median(values) for name, values in times.items()}
    copied = ready[COPY].least_bytes / milliseconds[COPY]
    costs = {
        name: Cost(
            milliseconds[name], peaks[name], *kernels[name], call.least_bytes / milliseconds[name] / copied
        )
        for name, call in ready.items()
    }
    return costs, left_out


def why(error: Exception) -> str:
    """Return one line that says why something is not measured."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"not installed: {error.name}"
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def _peak(call: Call, device: torch.device) -> int:
    prepared = call.prepare()
    if device.type == "cpu":
        return live_bytes(lambda: call.run(prepared)).peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call.run(prepared)
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def _kernels(call: Call, device: torch.device) -> tuple[int, dict[str, float]]:
    """Return the number of kernels, and the longest by name."""
    prepared = call.prepare()
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        torch.cuda.synchronize()
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiled:
        result = call.run(prepared)
        if device.type == "cuda":
            torch.cuda.synchronize()
    del result
    if device.type == "cuda":
        # Regions that have a name lie over the kernels, and would count them twice.
        events = [
            event
            for event in profiled.events() or ()
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        ]
    else:
        events = [event for event in profiled.events() or () if not event.cpu_children]
    totals: dict[str, float] = {}
    for event in events:
        name = event.name[:70]
        totals[name] = totals.get(name, 0.0) + event.time_range.elapsed_us() / 1e3
    longest = sorted(totals, key=lambda name: -totals[name])[:LONGEST]
    return len(events), {name: totals[name] for name in longest}


def _milliseconds(call: Call, device: torch.device) -> float:
    prepared = call.prepare()
    if device.type == "cpu":
        start = time.perf_counter()
        call.run(prepared)
        return 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call.run(prepared)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
