"""The size of a tile of deferred logits: memory, and time beside the default size.

    python -m benchmarks.bench_tiles [--quick]

The sizes take turns in one run. Writes docs/benchmarks/tiles.md. The step ``head`` of ``make gpu`` times the
sizes on a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

from megatron_rl_patches.testing import spawn_ranks
from tests.unit.losses.live_bytes import live_bytes

from ._loss_report import _table as table
from ._machine import description
from .bench_head import MODES, Setup, deferred, inputs_of, step
from .bench_loss import WARM_HEAP

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "tiles.md"
DEFAULT_MIB = 64
SIZES_MIB = (2, 8, 32, DEFAULT_MIB, 128, 512)
SETUPS = [
    Setup(1024, 1024, 32768, torch.float32),
    Setup(512, 512, 151936, torch.float32),
    Setup(512, 512, 151936, torch.bfloat16),
    Setup(256, 4096, 32768, torch.float32),
]
QUICK = [Setup(256, 64, 8192, torch.float32)]
ALL_ROWS, SCORING = MODES[0], MODES[-1]
TURNS = 5

#: (setup, mode) -> size of a tile -> peak in bytes and seconds.
Result = dict[tuple[str, str], dict[int, tuple[int, float]]]


def measure(setups: Sequence[Setup], turns: int) -> Result:
    torch.set_num_threads(1)
    result: Result = {}
    for setup in setups:
        for mode in (ALL_ROWS, SCORING):
            x = inputs_of(setup, mode)
            gradients = sum(t.nbytes for t in (x.hidden, x.weight) if t.requires_grad)
            steps: dict[int, Callable[[], object]] = {
                size: partial(step, partial(deferred, tile_bytes=size << 20), x, mode) for size in SIZES_MIB
            }
            peaks = {size: live_bytes(one).peak - gradients for size, one in steps.items()}
            seconds: dict[int, list[float]] = {size: [] for size in steps}
            for _ in range(turns):
                for size, one in steps.items():
                    start = time.process_time()
                    one()
                    seconds[size].append(time.process_time() - start)
            result[str(setup), mode.name] = {size: (peaks[size], median(seconds[size])) for size in steps}
    return result


def render(result: Result) -> str:
    return "\n".join(
        [
            "# The size of a tile",
            "",
            "`python -m benchmarks.bench_tiles`: log-probabilities of deferred logits, forward and backward",
            "(all rows) or forward alone (scoring), on one thread, with `tile_bytes` of several sizes.",
            f"{description()}.",
            "",
            *_section(
                "CPU time, that of the default = 1", result, lambda cost, default: cost[1] / default[1], ".2f"
            ),
            *_section(
                "Memory: peak beyond the gradients, in MiB", result, lambda cost, _: cost[0] / 2**20, ".0f"
            ),
            f"The default on a CPU is {DEFAULT_MIB} MiB. Small tiles mean more calls, and read and write the",
            "gradient of the hidden states more often; large ones take more memory. On a GPU the default is",
            "512 MiB, which has not been measured yet: `make gpu` does it.",
            "",
        ]
    )


def _section(
    title: str,
    result: Result,
    value: Callable[[tuple[int, float], tuple[int, float]], float],
    form: str,
) -> Iterator[str]:
    yield from (f"## {title}", "")
    header = ["setup", "rows", *(f"{size} MiB" for size in SIZES_MIB)]
    rows = [
        [setup, mode, *(format(value(costs[size], costs[DEFAULT_MIB]), form) for size in SIZES_MIB)]
        for (setup, mode), costs in result.items()
    ]
    yield from table(header, rows)
    yield ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small shape; writes nothing")
    quick = parser.parse_args(arguments).quick
    setups, turns = (QUICK, 1) if quick else (SETUPS, TURNS)
    [result] = spawn_ranks(measure, 1, setups, turns, timeout=3600, env=WARM_HEAP)
    page = render(result)
    print(page)
    if not quick:
        PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
