"""Memory and time of an output layer with its loss on one GPU, beside its matrix products alone.

    python3 -m benchmarks.head_on_gpu [--rows N] [--hidden H] [--vocabulary V] [--seconds S] [--json FILE]

It needs torch and this repository, and measures Liger's loss and verl's kernel where they are installed. All
ways take turns in one run. Memory is the peak that torch's allocator reports during forward and backward,
without the gradients. Without a GPU it runs on the CPU: pass small sizes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from tests.unit.losses.live_bytes import live_bytes

from ._machine import description
from .bench_head import MODES, TEMPERATURE, WAYS, Inputs, Mode, Setup, Way, inputs_of, step

PRODUCTS = "matrix products alone"


def products(x: Inputs, mode: Mode) -> None:
    """Multiply as often as a loss that makes the logits must, of the rows that it reads."""
    hidden = _rows_of(x).detach()
    logits = hidden @ x.weight.detach().T
    if mode.trains_hidden:
        torch.mm(logits, x.weight.detach())
    if mode.trains_weight:
        torch.mm(logits.T, hidden)


def liger() -> Way:
    """Load a loss that weighs all tokens alike, without a temperature: it computes gradients in forward."""
    from liger_kernel.ops.fused_linear_cross_entropy import (  # type: ignore[import-not-found, unused-ignore]
        LigerFusedLinearCrossEntropyFunction,
    )

    def way(x: Inputs) -> Tensor:
        options = (None, None, -100, 0.0, 0.0, "sum")
        loss = LigerFusedLinearCrossEntropyFunction.apply(_rows_of(x), x.weight, x.targets, *options)[0]
        return -loss.expand(len(x.targets))

    return way


def verl() -> Way:
    from verl.utils.kernel.linear_cross_entropy import (  # type: ignore[import-not-found, unused-ignore]
        linear_cross_entropy,
    )

    def way(x: Inputs) -> Tensor:
        log_probs: Tensor = linear_cross_entropy(_rows_of(x), x.weight, x.targets, TEMPERATURE, "none", None)[
            0
        ]
        return log_probs

    return way


def _rows_of(x: Inputs) -> Tensor:
    return x.hidden if x.rows is None else x.hidden[x.rows]


OTHERS: dict[str, Callable[[], Way]] = {"Liger": liger, "verl's kernel": verl}


def measure(setup: Setup, seconds: float, device: torch.device) -> dict[str, dict[str, tuple[float, float]]]:
    """Return for each mode and way the milliseconds, and the peak in GiB beyond the gradients."""
    ways = dict(WAYS)
    for name, load in OTHERS.items():
        try:
            ways[name] = load()
        except Exception as error:  # triton raises what it likes where there is no driver
            print(f"{name} is not measured: {error}")
    return {mode.name: _of_mode(setup, mode, ways, seconds, device) for mode in MODES}


def _of_mode(
    setup: Setup, mode: Mode, ways: dict[str, Way], seconds: float, device: torch.device
) -> dict[str, tuple[float, float]]:
    x = _on(device, inputs_of(setup, mode))
    gradients = sum(t.nbytes for t in (x.hidden, x.weight) if t.requires_grad)
    calls: dict[str, Callable[[], object]] = {PRODUCTS: lambda: products(x, mode)}
    calls |= {name: lambda way=way: step(way, x, mode) for name, way in ways.items()}  # type: ignore[misc]
    peaks: dict[str, int] = {}
    for name, call in list(calls.items()):
        try:
            call()  # compiles
            peaks[name] = _peak(call, device) - gradients
        except Exception as error:  # out of memory, or a kernel for another GPU
            print(f"{mode.name}: {name} is not measured: {str(error).splitlines()[0]}")
            del calls[name]
    taken: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken[PRODUCTS]) < 3:
        for name, call in calls.items():
            taken[name].append(_seconds(call, device))
    return {name: (1e3 * median(taken[name]), peaks[name] / 2**30) for name in calls}


def _on(device: torch.device, x: Inputs) -> Inputs:
    def moved(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device).requires_grad_(tensor.requires_grad)

    rows = x.rows.to(device) if isinstance(x.rows, Tensor) else x.rows
    return replace(
        x,
        hidden=moved(x.hidden),
        weight=moved(x.weight),
        targets=x.targets.to(device),
        rows=rows,
        advantages=x.advantages.to(device),
    )


def _peak(call: Callable[[], object], device: torch.device) -> int:
    if device.type == "cpu":
        return live_bytes(call).peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start_event.record()
    call()
    end_event.record()
    end_event.synchronize()
    return start_event.elapsed_time(end_event) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring time, for each mode")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setup = Setup(options.rows, options.hidden, options.vocabulary, torch.bfloat16)
    logits_bytes = 4 * options.rows * options.vocabulary
    print(f"{description()}\n{setup}; float32 logits take {logits_bytes / 2**30:.2f} GiB")
    figures = measure(setup, options.seconds, device)
    for mode, ways in figures.items():
        print(f"\n{mode:34} {'ms':>8} {'GiB':>7}")
        for name, (milliseconds, peak) in ways.items():
            print(f"{name:34} {milliseconds:8.1f} {peak:7.2f}")
    if options.json:
        options.json.write_text(
            json.dumps({"machine": description(), "setup": str(setup), "figures": figures})
        )


if __name__ == "__main__":
    main()
