"""The size of a tile of deferred logits: memory, and time beside the default size."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from tests.references.heads import Setup

from .head import ALL_ROWS, QUICK, SCORING, SETUPS, call, deferred, inputs_of
from .measure import TURNS, Result, on_ranks
from .page import Benchmark, table

SIZES = {f"{mib} MiB": mib << 20 for mib in (2, 8, 32, 64, 128, 512)}
DEFAULT = "64 MiB"


def measure(quick: bool) -> list[Result]:
    setups = QUICK if quick else (*SETUPS, Setup(256, 4096, 32768))
    return on_ranks(_measure, setups, turns=1 if quick else TURNS)


def _measure(setup: Setup, turns: int) -> Result:
    result = Result(setup, DEFAULT)
    for mode in (ALL_ROWS, SCORING):
        x = inputs_of(setup, mode)
        calls = {size: call(x, partial(deferred, tile_bytes=nbytes)) for size, nbytes in SIZES.items()}
        result.measure(mode, calls, turns, clock=time.process_time)
    return result


def parts(results: Sequence[Result]) -> dict[str, str]:
    return {
        "time": _table(results, lambda result, mode, size: f"{result.duration(mode, size):.2f}"),
        "memory": _table(
            results, lambda result, mode, size: f"{result.costs[mode][size].peak_bytes / 2**20:.0f}"
        ),
    }


def _table(results: Sequence[Result], cell: Callable[[Result, str, str], str]) -> str:
    return table(
        {"setup": str(result.setup), "rows": mode, **{size: cell(result, mode, size) for size in SIZES}}
        for result in results
        for mode in result.costs
    )


BENCHMARK = Benchmark(measure, parts)
