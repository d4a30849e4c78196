"""Memory, time and error of losses over logits: ours, the usual formulas, and those of other frameworks.

    SLIME_DIR=... VERL_DIR=... NEMO_RL_DIR=... python -m benchmarks.bench_loss [--quick] [--seconds S]

What is not installed and not checked out is left out, and said to be. All in one run: each call takes turns
with a copy of the logits, and its time is given in copies. Writes docs/benchmarks/loss.md and a plot.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megatron_rl_patches.testing import spawn_ranks

from . import _loss_measure, _loss_report
from ._loss_measure import Result, Setup

DOCS = Path(__file__).parents[1] / "docs"
PAGE, PLOT = DOCS / "benchmarks" / "loss.md", DOCS / "images" / "loss_memory_and_time.png"
# By tensor-parallel size. The larger vocabulary in float32 alone, so that a run takes a few minutes.
SETUPS = {
    1: [
        Setup(1, 2048, 32768, "float32"),
        Setup(1, 2048, 32768, "bfloat16"),
        Setup(1, 1024, 151936, "float32"),
    ],
    2: [Setup(2, 2048, 32768, "float32")],
}
QUICK_ROWS = 128
# Freed memory stays with the process ("warm heap"): else a CPU run measures page faults.
WARM_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 28)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small shapes; writes nothing")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each loss and mode")
    options = parser.parse_args(arguments)
    results: list[Result] = []
    for tp_size in (1, 2):
        if torch.cuda.is_available() and tp_size > torch.cuda.device_count():
            continue
        setups = SETUPS[tp_size]
        if options.quick:
            setups = [replace(setup, rows=QUICK_ROWS) for setup in setups]
        ranks = spawn_ranks(
            _loss_measure.measure, tp_size, setups, options.seconds, timeout=3600, env=WARM_HEAP
        )
        results += [slowest(of_ranks) for of_ranks in zip(*ranks, strict=True)]
    page = _loss_report.render(results)
    print(page)
    if not options.quick:
        PAGE.write_text(page)
        _loss_report.plot(results, PLOT)


def slowest(of_ranks: Sequence[Result]) -> Result:
    """Return the result of the first rank with each loss's cost on the rank where it took longest."""
    first = of_ranks[0]
    costs = {
        key: max((result.costs[key] for result in of_ranks), key=lambda cost: cost.total)
        for key in first.costs
        if all(key in result.costs for result in of_ranks)
    }
    return Result(first.setup, first.floor, costs, first.missing)


if __name__ == "__main__":
    main()
