"""The size of a tile of deferred logits: memory, and time beside the default size."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from .head import ALL_ROWS, QUICK, SCORING, SETUPS, Setup, call, inputs_of
from .head_candidates import deferred
from .measure import Cost, Result, on_ranks
from .page import Benchmark, table

DEFAULT_MIB = 64
SIZES_MIB = (2, 8, 32, DEFAULT_MIB, 128, 512)


def measure(quick: bool) -> list[Result]:
    if quick:
        return on_ranks(_measure, QUICK, turns=1)
    return on_ranks(_measure, [*SETUPS, Setup(256, 4096, 32768)])


def _measure(setup: Setup, turns: int) -> Result:
    result = Result(setup)
    for mode in (ALL_ROWS, SCORING):
        x = inputs_of(setup, mode)
        calls = {f"{mib} MiB": call(x, partial(deferred, tile_bytes=mib << 20)) for mib in SIZES_MIB}
        result.measure(mode.name, calls, turns, clock=time.process_time)
    return result


def parts(results: Sequence[Result]) -> dict[str, str]:
    return {
        "time": _table(results, lambda cost, default: f"{cost.milliseconds / default.milliseconds:.2f}"),
        "memory": _table(results, lambda cost, _: f"{cost.peak_bytes / 2**20:.0f}"),
    }


def _table(results: Sequence[Result], value: Callable[[Cost, Cost], str]) -> str:
    return table(
        {
            "setup": str(result.setup),
            "rows": mode,
            **{size: value(cost, costs[f"{DEFAULT_MIB} MiB"]) for size, cost in costs.items()},
        }
        for result in results
        for mode, costs in result.costs.items()
    )


BENCHMARK = Benchmark(measure, parts)
