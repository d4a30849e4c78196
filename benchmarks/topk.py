"""Memory, time, error and bytes sent of top-k distillation: ours, the usual formula, and other frameworks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.real.sent_bytes import sent_bytes
from tests.unit.losses.logits.dense_topk import dense_log_probs_at

from .candidates import calls
from .logits import COPY, REFERENCE_ROWS, Logits, LogitsSetup, in_copies, in_logits
from .measure import Call, Cost, Result, largest_error, on_ranks
from .page import Benchmark, bars, join, left_out, number, table
from .topk_candidates import AT_IDS, SELECTIONS, AtIds, Selection

# Probability of the tail in the rows by which errors are measured.
TAILS = (1e-1, 1e-4, 1e-7, 1e-9)
AT_GIVEN_IDS, SELECTION = "at given ids", "selection"


@dataclass(frozen=True)
class Setup(LogitsSetup):
    k: int = 64

    def __str__(self) -> str:
        return f"{super().__str__()}, K = {self.k}"


SETUPS = [Setup(tp, *shape) for tp in (1, 2) for shape in ((512, 32768), (256, 151936, torch.float32, 256))]
QUICK = [Setup(tp, 128, 4096, k=16) for tp in (1, 2)]


class Inputs(Logits):
    """What a rank's functions are given."""

    def __init__(self, setup: Setup, group: dist.ProcessGroup) -> None:
        super().__init__(setup, group)
        options: dict[str, Any] = {"generator": self.generator, "device": self.device}
        self.k = setup.k
        self.ids = torch.rand(setup.rows, setup.vocab, **options).topk(setup.k).indices

    def at_ids(self, at_ids: AtIds) -> Call:
        """Return the call of forward and backward."""

        def run(logits: Tensor) -> Tensor:
            values = at_ids(logits, self.ids, self.group)
            return torch.autograd.grad([value.sum() for value in values], logits)[0]

        def details() -> tuple[float, ...]:
            errors = [self._gradient_error(at_ids), *(self._tail_error(at_ids, tail) for tail in TAILS)]
            return *_sent(partial(run, self.fresh())), *errors

        return Call(run, self.fresh, least_bytes=3 * self.pristine.nbytes, details=details)

    def selection(self, select: Selection) -> Call:
        def run(_: object) -> Tensor:
            return select(self.pristine, self.k, self.group)

        return Call(run, least_bytes=self.pristine.nbytes, details=lambda: _sent(partial(run, None)))

    def _gradient_error(self, at_ids: AtIds) -> float:
        """Of log-probabilities, and of the tail where there is one, relative to the largest value."""
        return largest_error(*self._gradients(at_ids, self.first_rows, slice(None)))

    def _tail_error(self, at_ids: AtIds, tail: float) -> float:
        """Relative, of the gradient of the tail's log-probability outside the ids."""
        ids = self.ids[:REFERENCE_ROWS].cpu()
        inside = torch.zeros_like(self.first_rows, dtype=torch.bool).scatter_(1, ids, True)
        p = self.first_rows.double().softmax(1)
        now = p.masked_fill(inside, 0.0).sum(1, keepdim=True)
        shift = torch.where(inside, ((1 / tail - 1) / ((1 - now) / now)).log(), 0.0)
        logits = self.first_rows + shift.to(self.first_rows.dtype)
        measured, expected = self._gradients(at_ids, logits, slice(1, 2))
        outside = ~inside[:, self.columns]
        return largest_error(measured[outside], expected[outside])

    def _gradients(self, at_ids: AtIds, logits: Tensor, which: slice) -> tuple[Tensor, Tensor]:
        """Of as many of the two values as there are: measured, and expected by float64."""
        ids = self.ids[:REFERENCE_ROWS]
        leaf = logits[:, self.columns].to(self.device, copy=True).requires_grad_()
        exact = logits.double().requires_grad_()
        values = at_ids(leaf * 1, ids, self.group)
        if not values[which]:
            return torch.full_like(leaf, math.nan).cpu(), exact.detach()[:, self.columns]
        reference = dense_log_probs_at(exact, ids.cpu())[: len(values)]
        [measured] = torch.autograd.grad([value.sum() for value in values[which]], leaf)
        [expected] = torch.autograd.grad([value.sum() for value in reference[which]], exact)
        return measured.cpu(), expected[:, self.columns]


def _sent(call: Any) -> tuple[float, float]:
    """Return how many bytes a rank gives to collectives, and how many it calls."""
    with sent_bytes() as sent:
        call()
    return sum(nbytes for _, nbytes in sent), len(sent)


def measure(quick: bool) -> list[Result]:
    return on_ranks(_measure, QUICK, turns=1) if quick else on_ranks(_measure, SETUPS)


def _measure(setup: Setup, turns: int) -> Result:
    warnings.simplefilter("ignore")  # of frameworks and of megatron-core, about what is not installed
    inputs = Inputs(setup, dist.new_group(list(range(setup.tp_size))))
    copy, result = {COPY: inputs.copy()}, Result(setup)
    at_ids = calls(AT_IDS, inputs.at_ids, result.left_out, setup.tp_size)
    result.measure(AT_GIVEN_IDS, copy | at_ids, turns)
    selections = calls(SELECTIONS, inputs.selection, result.left_out, setup.tp_size)
    result.measure(SELECTION, copy | selections, turns)
    return result


def parts(results: Sequence[Result]) -> dict[str, str]:
    return {"top-k": join(*(_section(result) for result in results))}


def _section(result: Result) -> str:
    errors = ["gradient error", *(f"tail {tail:g}" for tail in TAILS)]
    at_ids = [
        {AT_GIVEN_IDS: name, **_numbers(result, AT_GIVEN_IDS, cost)}
        | {error: number(value, ".0e") for error, value in zip(errors, cost.details[2:], strict=True)}
        for name, cost in _without_copy(result, AT_GIVEN_IDS).items()
    ]
    selections = [
        {SELECTION: name, **_numbers(result, SELECTION, cost)}
        for name, cost in _without_copy(result, SELECTION).items()
    ]
    return join(
        f"## {result.setup}",
        f"One copy of a rank's logits takes {result.costs[AT_GIVEN_IDS][COPY].milliseconds:.1f} ms.",
        table(at_ids),
        table(selections),
        left_out(result.left_out),
    )


def _without_copy(result: Result, mode: str) -> dict[str, Cost]:
    return {name: cost for name, cost in result.costs[mode].items() if name != COPY}


def _numbers(result: Result, mode: str, cost: Cost) -> dict[str, str]:
    numbers = {
        "memory": f"{in_logits(result, cost):.3f}",
        "time": f"{in_copies(result, mode, cost):.1f}",
    }
    if result.setup.tp_size > 1:
        nbytes, collectives, *_ = cost.details
        numbers["sent"] = f"{nbytes / result.setup.rows:,.0f}"
        numbers["collectives"] = f"{collectives:.0f}"
    return numbers


def plot(results: Sequence[Result], figure: Any) -> None:
    result = results[0]
    memory, duration = figure.subplots(1, 2, sharey=True)
    costs = _without_copy(result, AT_GIVEN_IDS)
    times = {name: in_copies(result, AT_GIVEN_IDS, cost) for name, cost in costs.items()}
    bars(memory, "extra memory, × logits", {"": {n: in_logits(result, cost) for n, cost in costs.items()}})
    bars(duration, "forward + backward, × one copy of the logits", {"": times})
    for axes in (memory, duration):
        axes.bar_label(axes.containers[0], fmt="%.3g", padding=3)
        axes.set(xscale="log")
        axes.margins(x=0.2)
    figure.suptitle(f"Log-probabilities at given ids, and the tail: {result.setup}")


BENCHMARK = Benchmark(measure, parts, plot, image="topk_memory_and_time.png", inches=(11, 3.5))
