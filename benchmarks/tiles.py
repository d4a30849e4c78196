"""The size of a tile of deferred logits: memory, and time beside the default size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from tests.references.heads import Setup

from .head import ALL_ROWS, QUICK, SCORING, SETUPS, call, deferred, inputs_of
from .measure import TURNS, Result, on_ranks, rows
from .page import Benchmark, Parts

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


def parts(results: Sequence[Result]) -> Parts:
    return {"tiles": rows(results, "mode", "tile")}


BENCHMARK = Benchmark(measure, parts)
