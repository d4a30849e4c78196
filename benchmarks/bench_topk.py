"""Memory, time, error and bytes sent of top-k distillation: ours, the usual formula, other frameworks' own.

    NEMO_RL_DIR=... OPENCLAW_DIR=.../slime python -m benchmarks.bench_topk [--quick]

What is not checked out is left out, and said to be. Writes docs/benchmarks/topk.md and a plot.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_patches.testing import spawn_ranks
from tests.real.sent_bytes import sent_bytes
from tests.unit.losses.live_bytes import live_bytes
from tests.unit.losses.logits.dense_topk import dense_log_probs_at

from . import _machine
from ._loss_measure import _why as why
from ._loss_report import _table as table
from ._topk_candidates import AT_IDS, SELECTIONS, AtIds, Candidate, Selection
from .bench_loss import WARM_HEAP

DOCS = Path(__file__).parents[1] / "docs"
PAGE, PLOT = DOCS / "benchmarks" / "topk.md", DOCS / "images" / "topk_memory_and_time.png"
TURNS, REFERENCE_ROWS = 5, 64
# Probability of the tail in the rows by which errors are measured.
TAILS = (1e-1, 1e-4, 1e-7, 1e-9)


@dataclass(frozen=True)
class Setup:
    tp_size: int
    rows: int
    vocab: int
    k: int

    @property
    def name(self) -> str:
        return f"TP {self.tp_size}, float32 [{self.rows}, {self.vocab}], K = {self.k}"


@dataclass(frozen=True)
class Cost:
    """Memory in bytes of the logits, time in copies of them, and what a rank sends."""

    memory: float
    time: float
    bytes_per_row: float
    calls: int
    gradient_error: float | None = None
    tail_errors: tuple[float, ...] = ()


@dataclass
class Result:
    setup: Setup
    copy_ms: float = 0.0
    at_ids: dict[str, Cost] = field(default_factory=dict)
    selections: dict[str, Cost] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


SETUPS = [
    Setup(tp, rows, vocab, k) for tp in (1, 2) for rows, vocab, k in ((512, 32768, 64), (256, 151936, 256))
]
QUICK_SETUPS = [Setup(tp, 128, 4096, 16) for tp in (1, 2)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small shapes; writes nothing")
    quick = parser.parse_args(arguments).quick
    results = []
    for setup in QUICK_SETUPS if quick else SETUPS:
        ranks = spawn_ranks(measure, setup.tp_size, setup, timeout=3600, env=WARM_HEAP)
        results.append(max(ranks, key=lambda result: result.at_ids["ours"].time))
    page = render(results)
    print(page)
    if not quick:
        PAGE.write_text(page)
        plot(results[0], PLOT)
    return 0


def measure(setup: Setup) -> Result:
    """On each rank."""
    warnings.simplefilter("ignore")  # of frameworks and of megatron-core, about what is not installed
    bench = _Bench(setup)
    result = Result(setup)
    for candidates, costs, cost in (
        (AT_IDS, result.at_ids, bench.at_ids),
        (SELECTIONS, result.selections, bench.selection),
    ):
        for candidate in candidates:
            try:
                costs[candidate.name] = cost(candidate)
            except Exception as error:
                result.missing[candidate.name] = why(error)
    result.copy_ms = bench.copy_ms()
    return result


class _Bench:
    def __init__(self, setup: Setup) -> None:
        self.setup, self.group = setup, dist.new_group(list(range(setup.tp_size)))
        generator = torch.Generator().manual_seed(0)
        self.whole = torch.randn(setup.rows, setup.vocab, generator=generator) * 2
        self.ids = torch.rand(setup.rows, setup.vocab, generator=generator).topk(setup.k).indices
        width = setup.vocab // setup.tp_size
        self.columns = slice(self.group.rank() * width, (self.group.rank() + 1) * width)
        self.logits = self.whole[:, self.columns].clone()
        self.copy_into = torch.empty_like(self.logits)
        self.one = torch.ones((), requires_grad=True)

    def at_ids(self, candidate: Candidate) -> Cost:
        if self.setup.tp_size > 1 and not candidate.splits_vocabulary:
            raise NotImplementedError("does not split the vocabulary")
        at_ids: AtIds = candidate.load()
        gradient_error = self._gradient_error(at_ids)
        logits: list[Tensor] = []

        def prepare() -> None:
            logits[:] = [self.logits * self.one]  # as a model hands them over: no leaf

        def call() -> Tensor:
            values = at_ids(logits[0], self.ids, self.group)
            return torch.autograd.grad([value.sum() for value in values], logits[0])[0]

        cost = self._cost(call, prepare)
        tail_errors = tuple(self._tail_error(at_ids, tail) for tail in TAILS)
        return Cost(*cost, gradient_error, tail_errors)

    def selection(self, candidate: Candidate) -> Cost:
        select: Selection = candidate.load()
        return Cost(*self._cost(lambda: select(self.logits, self.setup.k, self.group), lambda: None))

    def copy_ms(self) -> float:
        return 1e3 * statistics.median(self._time(self._copy) for _ in range(TURNS))

    def _cost(self, call: Callable[[], Any], prepare: Callable[[], None]) -> tuple[float, float, float, int]:
        prepare()
        with sent_bytes() as sent:
            call()  # and warm-up
        prepare()
        memory = live_bytes(call).peak / (self.logits.numel() * self.logits.element_size())
        times, copies = [], []
        for _ in range(TURNS):
            prepare()
            times.append(self._time(call))
            copies.append(self._time(self._copy))
        total = sum(nbytes for _, nbytes in sent)
        return (
            memory,
            statistics.median(times) / statistics.median(copies),
            total / self.setup.rows,
            len(sent),
        )

    def _gradient_error(self, at_ids: AtIds) -> float:
        """Of log-probabilities, and of the tail where there is one, relative to the largest value."""
        logits, ids = self.whole[:REFERENCE_ROWS], self.ids[:REFERENCE_ROWS]
        found, expected = self._gradients(at_ids, logits, ids, slice(None))
        return ((found - expected).abs().max() / expected.abs().max()).item()

    def _tail_error(self, at_ids: AtIds, tail: float) -> float:
        """Relative, of the gradient of the tail's log-probability outside the ids."""
        logits, ids = self.whole[:REFERENCE_ROWS].clone(), self.ids[:REFERENCE_ROWS]
        inside = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, True)
        p = logits.double().softmax(1)
        now = p.masked_fill(inside, 0.0).sum(1, keepdim=True)
        logits += torch.where(inside, ((1 / tail - 1) / ((1 - now) / now)).log(), 0.0).float()
        found, expected = self._gradients(at_ids, logits, ids, slice(1, 2))
        outside = ~inside[:, self.columns]
        return ((found - expected)[outside].abs().max() / expected[outside].abs().max()).item()

    def _gradients(self, at_ids: AtIds, logits: Tensor, ids: Tensor, which: slice) -> tuple[Tensor, Tensor]:
        """Found here, and expected of float64; of as many of the two values as there are."""
        leaf = logits[:, self.columns].clone().requires_grad_()
        values = at_ids(leaf * 1, ids, self.group)
        exact = logits.double().requires_grad_()
        reference = dense_log_probs_at(exact, ids)[: len(values)]
        if not values[which]:
            return torch.full_like(leaf, float("nan")), exact.detach()[:, self.columns]
        [found] = torch.autograd.grad([value.sum() for value in values[which]], leaf)
        [expected] = torch.autograd.grad([value.sum() for value in reference[which]], exact)
        return found.double(), expected[:, self.columns]

    def _copy(self) -> None:
        self.copy_into.copy_(self.logits)

    def _time(self, call: Callable[[], Any]) -> float:
        dist.barrier(self.group)
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


def render(results: Sequence[Result]) -> str:
    return "\n".join(
        [
            "# Top-k distillation",
            "",
            "`python -m benchmarks.bench_topk`: log-probabilities at K given ids of each row and of the",
            "tail, forward and backward, and the selection of the K most probable ids.",
            f"{_machine.description()}; one thread per rank.",
            "",
            "- Memory: peak of live bytes beyond the logits, results and gradient included, × a rank's",
            "  logits.",
            "- Time: median of calls that take turns with a copy of a rank's logits, × the median of the",
            "  copies.",
            "- Sent: bytes that a rank gives to collectives, per row, in forward and backward together.",
            f"- Gradient error: largest difference from float64 over {REFERENCE_ROWS} rows, relative to the",
            "  largest value, of the sum of all values.",
            "- Tail: relative error of the gradient of the tail's log-probability outside the ids, where the",
            f"  tail has a probability of {', '.join(f'{tail:g}' for tail in TAILS)}. –: there is no tail.",
            "- Other frameworks' functions are their own, from a checkout. OpenClaw-RL's loop over ids is",
            "  written anew around its `compute_log_probs`.",
            "",
            "![extra memory and time](../images/topk_memory_and_time.png)",
            "",
            *(line for result in results for line in _section(result)),
            "Not measured here: GPUs.",
            "",
        ]
    )


def _section(result: Result) -> Iterator[str]:
    yield from (f"## {result.setup.name}", "")
    yield from (f"One copy of a rank's logits takes {result.copy_ms:.1f} ms.", "")
    several = result.setup.tp_size > 1
    numbers = ["memory", "time", *(["sent", "collectives"] if several else [])]
    header = ["at given ids", *numbers, "gradient error", *(f"tail {tail:g}" for tail in TAILS)]
    rows = [[name, *_numbers(cost, several), *_errors(cost)] for name, cost in result.at_ids.items()]
    yield from table(header, rows)
    yield ""
    rows = [[name, *_numbers(cost, several)] for name, cost in result.selections.items()]
    yield from table(["selection", *numbers], rows)
    yield ""
    if result.missing:
        yield "Left out: " + "; ".join(f"{name} ({why})" for name, why in result.missing.items()) + "."
        yield ""


def _numbers(cost: Cost, several: bool) -> list[str]:
    sent = [f"{cost.bytes_per_row:,.0f}", str(cost.calls)] if several else []
    return [f"{cost.memory:.3f}", f"{cost.time:.1f}", *sent]


def _errors(cost: Cost) -> list[str]:
    errors = [cost.gradient_error, *cost.tail_errors]
    return ["–" if error is None or error != error else f"{error:.0e}" for error in errors]


def plot(result: Result, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(result.at_ids)
    figure, both = pyplot.subplots(1, 2, figsize=(11, 3.5), sharey=True, layout="constrained")
    readings: tuple[tuple[str, Callable[[Cost], float]], ...] = (
        ("extra memory, × logits", lambda cost: cost.memory),
        ("forward + backward, × one copy of the logits", lambda cost: cost.time),
    )
    for axes, (label, reading) in zip(both, readings, strict=True):
        bars = axes.barh(names, [reading(cost) for cost in result.at_ids.values()])
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.set(xlabel=label, xscale="log")
        axes.margins(x=0.2)
        axes.grid(axis="x", alpha=0.3)
    both[0].invert_yaxis()
    figure.suptitle(f"Log-probabilities at given ids, and the tail: {result.setup.name}")
    _machine.stamp(figure)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
