"""Students of two teachers, trained to the end on every layout of two ranks of real megatron-core."""

from __future__ import annotations

import itertools
import tempfile

import torch

from tests.references.distillation_task import ORDERS, distill

from .page import Benchmark, Parts, Table

LAYOUTS: dict[str, dict[str, int]] = {"DP 2": {}, "TP 2": {"tp": 2}, "PP 2": {"pp": 2}, "CP 2": {"cp": 2}}
ROLLOUTS = {"routed": 40, "mixture": 120}
QUICK_ROLLOUTS = 4
#: Target, way and layout of each run. The top-k stands beside the whole vocabulary on one layout.
RUNS = [
    *itertools.product(ROLLOUTS, ["full"], LAYOUTS),
    *((target, "top-k", "DP 2") for target in ROLLOUTS),
]
GOAL = 0.9
#: A score is the mean of so many rollouts.
WINDOW = 3


def row(target: str, way: str, layout: str, scores_ro: torch.Tensor) -> dict[str, str]:
    """Return a row of the table, of the student's scores relative to those of the teachers."""
    means_ro = scores_ro.unfold(0, WINDOW, 1).mean(-1)
    below = (means_ro < GOAL).any(1).nonzero()
    first = int(below[-1]) + 1 if len(below) else 0  # from here on no score is below the goal
    return {
        "target": target,
        "way": way,
        "layout": layout,
        "rollouts": str(len(scores_ro)),
        **{f"score, {order}": f"{mean:.1%}" for order, mean in zip(ORDERS, means_ro[-1], strict=True)},
        "reached": str(first + WINDOW) if first < len(means_ro) else "–",
    }


def measure(quick: bool) -> list[dict[str, str]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for target, way, layout in RUNS:
            rollouts = QUICK_ROLLOUTS if quick else ROLLOUTS[target]
            scores_ro = distill(LAYOUTS[layout], target, way, folder, rollouts, timeout=3600)
            rows.append(row(target, way, layout, scores_ro))
            print(*rows[-1].values(), flush=True)
    return rows


def parts(rows: list[dict[str, str]]) -> Parts:
    return {"students": Table(3, rows)}


BENCHMARK = Benchmark(measure, parts)
