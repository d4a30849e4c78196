"""Students of two teachers, trained to the end on every layout of two ranks of real megatron-core."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.references.distillation_task import Student, distill

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


@dataclass(frozen=True)
class Run:
    target: str
    way: str
    layout: str
    student: Student

    def shares(self, order: str) -> list[float]:
        """Return the student's score / the teacher's, of each rollout and those just before it."""
        scores = torch.tensor(self.student.score[order]).unfold(0, WINDOW, 1).mean(1)
        return (scores / self.student.teachers[order]).tolist()

    @property
    def lowest(self) -> list[float]:
        """Return the smaller share of the two orders, of each rollout from the ``WINDOW``-th on."""
        return [min(both) for both in zip(*map(self.shares, self.student.teachers), strict=True)]

    @property
    def reached(self) -> int | None:
        """Return the rollout from which on both shares stay at the goal or above, counted from 1."""
        below = [number for number, share in enumerate(self.lowest) if share < GOAL]
        number = below[-1] + 1 if below else 0
        return number + WINDOW if number < len(self.lowest) else None


def measure(quick: bool) -> list[Run]:
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for target, way, layout in RUNS:
            rollouts = QUICK_ROLLOUTS if quick else ROLLOUTS[target]
            student = distill(LAYOUTS[layout], target, way, folder, rollouts, timeout=3600)
            runs.append(Run(target, way, layout, student))
            print(target, way, layout, f"{runs[-1].lowest[-1]:.1%}", flush=True)
    return runs


def parts(runs: Sequence[Run]) -> Parts:
    rows = [
        {
            "target": run.target,
            "way": run.way,
            "layout": run.layout,
            "rollouts": str(len(run.lowest) + WINDOW - 1),
            **{f"score, {order}": f"{run.shares(order)[-1]:.1%}" for order in run.student.teachers},
            "reached": str(run.reached or "–"),
        }
        for run in runs
    ]
    return {"students": Table(3, rows)}


BENCHMARK = Benchmark(measure, parts)
