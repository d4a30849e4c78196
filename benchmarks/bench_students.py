"""Students of two teachers, trained to the end on every layout of two ranks.

    python -m benchmarks.bench_students [--quick]

On real megatron-core, with the demo's model and teachers. Writes docs/benchmarks/students.md and a plot. It
takes about half an hour on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.real.students import Student, distill

from . import _machine
from ._loss_report import _table as table

DOCS = Path(__file__).parents[1] / "docs"
PAGE, PLOT = DOCS / "benchmarks" / "students.md", DOCS / "images" / "students.png"
LAYOUTS: dict[str, dict[str, int]] = {
    "DP 2": {},
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
    "CP 2": {"context_parallel_size": 2},
}
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few rollouts; writes nothing")
    quick = parser.parse_args(arguments).quick
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for target, way, layout in RUNS:
            rollouts = QUICK_ROLLOUTS if quick else ROLLOUTS[target]
            student = distill(LAYOUTS[layout], target, way, folder, rollouts, timeout=3600)
            runs.append(Run(target, way, layout, student))
            print(target, way, layout, f"{runs[-1].lowest[-1]:.1%}", flush=True)
    page = render(runs)
    print(page)
    if not quick:
        PAGE.write_text(page)
        plot(runs, PLOT)
    return 0


def render(runs: Sequence[Run]) -> str:
    return "\n".join(
        [
            "# Students trained to the end",
            "",
            "`python -m benchmarks.bench_students`: a student of the demo's two teachers on real",
            "megatron-core, two ranks, distilled with the reverse KL divergence.",
            f"{_machine.description()}.",
            "",
            "- Routed: a sample learns from the teacher for its order. Mixture: it learns from both, with",
            "  weight 3 for that teacher and 1 for the other.",
            "- Full: over the whole vocabulary, of 12 tokens. Top-k: over the student's 8 most probable",
            "  tokens and the tail.",
            "- Score: the student's fraction of right digits / the teacher's at its own task, mean of the",
            f"  last {WINDOW} rollouts. A rollout is one `train()` call: 8 optimizer steps on 256 prompts,",
            "  or with DP 2 on 512.",
            f"- Reached: the rollout from which on both scores stay at {GOAL:.0%} or above.",
            "",
            *_rows(runs),
            "",
            "![score per rollout on each layout](../images/students.png)",
            "",
            "A mixture takes more rollouts than a single teacher: a quarter of each target is the teacher of",
            "the other order. A run that stops while its curve still rises stays below the goal.",
            "",
        ]
    )


def _rows(runs: Sequence[Run]) -> Iterator[str]:
    orders = list(runs[0].student.teachers)
    header = ["target", "way", "layout", "rollouts", *(f"score, {order}" for order in orders), "reached"]
    rows = [
        [
            run.target,
            run.way,
            run.layout,
            str(len(run.student.score[orders[0]])),
            *(f"{run.shares(order)[-1]:.1%}" for order in orders),
            str(run.reached or "–"),
        ]
        for run in runs
    ]
    yield from table(header, rows)


def plot(runs: Sequence[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, both = pyplot.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for axes, target in zip(both, ROLLOUTS, strict=True):
        for run in (run for run in runs if run.target == target):
            lowest = run.lowest
            style = "--" if run.way == "top-k" else "-"
            label = f"{run.layout}, {run.way}"
            axes.plot(range(WINDOW, WINDOW + len(lowest)), lowest, style, label=label)
        axes.axhline(GOAL, color="gray", linestyle=":")
        axes.set(title=target, xlabel="rollout", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    both[0].set_ylabel("score of the student / the teacher's,\nthe lower one of two orders")
    both[0].legend()
    _machine.stamp(figure)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
