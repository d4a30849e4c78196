"""Memory, time and error of an output layer with its loss: materialized logits, and deferred ones."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from .candidates import Candidate, calls, revisions
from .head_candidates import (
    BASE,
    DEFERRED,
    HALF_KEPT,
    NAIVE,
    NEMO_RL,
    OTHERS,
    OURS,
    TEMPERATURE,
    Head,
    Inputs,
    deferred,
)
from .measure import DEVICE, TURNS, Call, Cost, Result, largest_error, on_ranks
from .page import Benchmark, bars, join, left_out, number, table

REFERENCE_ROWS = 64


@dataclass(frozen=True)
class Setup:
    rows: int
    hidden: int
    vocabulary: int
    dtype: torch.dtype = torch.float32

    @property
    def logits_bytes(self) -> int:
        """Bytes of float32 logits."""
        return 4 * self.rows * self.vocabulary

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"[{self.rows}, {self.hidden}] × {self.vocabulary}, {dtype}"


@dataclass(frozen=True)
class Mode:
    """What the loss reads, and what is trained."""

    name: str
    used_rows: float = 1.0
    trains_hidden: bool = True
    trains_weight: bool = True
    entropy: bool = False


SETUPS = (
    Setup(1024, 1024, 32768),
    Setup(512, 512, 151936),
    Setup(512, 512, 151936, torch.bfloat16),
)
# Memory alone, at the sizes of real runs.
LARGE = (Setup(8192, 256, 65536), Setup(4096, 256, 151936, torch.bfloat16))
# Memory and time, as rows and vocabulary grow.
GROWING = (
    Setup(1024, 256, 32768),
    Setup(2048, 256, 32768),
    Setup(4096, 256, 32768),
    Setup(1024, 256, 65536),
    Setup(1024, 256, 131072),
)
QUICK = (Setup(256, 64, 8192),)
ALL_ROWS = Mode("all rows")
HALF = Mode("half of the rows", used_rows=0.5)
FROZEN = Mode("frozen head", trains_weight=False)
SCORING = Mode("scoring", trains_hidden=False, trains_weight=False)
ENTROPY = Mode("entropy", entropy=True)
MODES = (ALL_ROWS, HALF, FROZEN, SCORING)
WAYS = [candidate.name for candidate in OURS]
# Half of the tiles can be kept for a backward pass only, and NeMo-RL's head has no entropy.
CANDIDATES = {
    ALL_ROWS: OURS + OTHERS,
    HALF: OURS,
    FROZEN: OURS + OTHERS,
    SCORING: [candidate for candidate in OURS if candidate.name != HALF_KEPT],
    ENTROPY: [candidate for candidate in OURS + OTHERS if candidate.name not in (HALF_KEPT, NEMO_RL)],
}


def inputs_of(setup: Setup, mode: Mode) -> Inputs:
    options: dict[str, Any] = {"generator": torch.Generator(DEVICE).manual_seed(0), "device": DEVICE}
    hidden = torch.randn(setup.rows, setup.hidden, **options).to(setup.dtype)
    weight = (3 * torch.randn(setup.vocabulary, setup.hidden, **options) / setup.hidden**0.5).to(setup.dtype)
    n, rows = int(setup.rows * mode.used_rows), None
    if mode.used_rows < 1:
        # Responses stand between prompts: pieces, not one range.
        rows = torch.arange(setup.rows, device=DEVICE).view(-1, 16)[::2].flatten()[:n]
    return Inputs(
        hidden.requires_grad_(mode.trains_hidden),
        weight.requires_grad_(mode.trains_weight),
        torch.randint(setup.vocabulary, (n,), **options),
        torch.randn(n, **options),
        rows,
        mode.entropy,
    )


def step(x: Inputs, head: Head) -> list[Tensor]:
    """Forward and backward; return log-probabilities or entropies, and gradients."""
    trained = [tensor for tensor in (x.hidden, x.weight) if tensor.requires_grad]
    with torch.set_grad_enabled(bool(trained)):
        values = head(x)[int(x.entropy)]
    gradients = torch.autograd.grad((values * x.advantages).sum(), trained) if trained else ()
    return [values.detach(), *gradients]


def call(x: Inputs, head: Head, details: Callable[[], tuple[float, ...]] = tuple) -> Call:
    """Return the call of a step."""
    read = x.hidden.nbytes + x.weight.nbytes
    gradients = sum(tensor.nbytes for tensor in (x.hidden, x.weight) if tensor.requires_grad)
    # Forward and backward read hidden states and weight, and backward writes their gradients.
    least_bytes = read * (2 if gradients else 1) + gradients
    return Call(lambda _: step(x, head), least_bytes=least_bytes, results_bytes=gradients, details=details)


@dataclass
class Results:
    large: list[Result]
    setups: list[Result]
    growing: list[Result]


def measure(quick: bool) -> Results:
    large, setups, growing = (QUICK, QUICK, QUICK) if quick else (LARGE, SETUPS, GROWING)
    turns = 1 if quick else TURNS
    without_naive = [candidate for candidate in OURS + OTHERS if candidate.name != NAIVE]
    return Results(
        on_ranks(partial(_measure, {ALL_ROWS: without_naive}), large, turns=0),
        on_ranks(partial(_measure, CANDIDATES), setups, turns),
        on_ranks(partial(_measure, {ALL_ROWS: [Candidate(DEFERRED, deferred)]}), growing, turns),
    )


def _measure(candidates: Mapping[Mode, Sequence[Candidate]], setup: Setup, turns: int) -> Result:
    """Measure the candidates of each mode; without turns, memory alone."""
    result = Result(setup)
    for mode, of_mode in candidates.items():
        call_of = partial(_call, setup, mode, inputs_of(setup, mode), turns > 0)
        steps = calls(of_mode, call_of, result.left_out)
        result.measure(mode.name, steps, 0 if mode.entropy else turns, clock=time.process_time)
    return result


def _call(setup: Setup, mode: Mode, x: Inputs, with_details: bool, head: Head) -> Call:
    """Return the call of a step, with its errors; if the head is frozen, with whether that saves nothing."""
    details = {ALL_ROWS: _errors, ENTROPY: _errors, FROZEN: _computes_frozen}.get(mode)
    return call(x, head, partial(details, setup, mode, head) if details and with_details else tuple)


def _errors(setup: Setup, mode: Mode, head: Head) -> tuple[float, float]:
    """Return the largest errors of values and of gradients."""
    x, expected = _expected(setup, mode)
    values, *gradients = map(largest_error, step(x, head), expected)
    return values, max(gradients)


@functools.cache
def _expected(setup: Setup, mode: Mode) -> tuple[Inputs, list[Tensor]]:
    """Return inputs of a few rows, and the results of a step in float64."""
    x = inputs_of(replace(setup, rows=REFERENCE_ROWS), mode)
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (x.hidden, x.weight))

    def exact(of: Inputs) -> tuple[Tensor, ...]:
        # In 16 bits the model's logits are what they are rounded to; gradients flow as if they were not.
        logits = linear(of.hidden, of.weight)
        if setup.dtype != torch.float32:
            logits = logits + (linear(x.hidden, x.weight).double() - logits).detach()
        log_p = (logits / TEMPERATURE).log_softmax(-1)
        log_probs = log_p.gather(1, of.targets[:, None]).squeeze(1)
        return log_probs, -(log_p.exp() * log_p).sum(-1)

    return x, step(replace(x, hidden=hidden, weight=weight, advantages=x.advantages.double()), exact)


def _computes_frozen(setup: Setup, mode: Mode, head: Head) -> tuple[float]:
    """Return 1 if backward makes a gradient of the weight that nobody asked for."""
    x = inputs_of(replace(setup, rows=8), mode)
    made: list[Tensor] = []

    def hook(gradients: Sequence[Tensor | None], _: Any) -> None:
        made.extend(g for g in gradients if g is not None and g.shape == x.weight.shape)

    [log_probs, *_] = head(x)
    nodes = [log_probs.grad_fn]
    for node in nodes:
        if node is not None:
            node.register_hook(hook)
            nodes.extend(following for following, _ in node.next_functions)
    torch.autograd.grad(log_probs.sum(), x.hidden)
    return (float(bool(made)),)


def parts(results: Results) -> dict[str, str]:
    setups, everything = results.setups, results.large + results.setups
    missing = {name: why for result in everything for name, why in result.left_out.items()}
    others = revisions(["nemo-rl", "SkyRL", "AReaL", "TRL", "TRL before 1.13"])
    modes = [(result, mode.name) for result in setups for mode in MODES]
    return {
        "memory": table(
            {"setup": str(result.setup), **{way: _memory(result, ALL_ROWS.name, way) for way in WAYS}}
            for result in everything
        ),
        "time": table(
            {"setup": str(result.setup), "rows": mode, **{way: _time(result, mode, way) for way in WAYS}}
            for result, mode in modes
        ),
        "errors": table(
            {"setup": str(result.setup), **{way: _errors_of(result, ALL_ROWS.name, way) for way in WAYS}}
            for result in setups
        ),
        "growth": table(_growth(results.growing)),
        "others": join(
            table(row for result in everything for row in _beside(result)),
            f"Others: {', '.join(others)}." if others else "",
            left_out(missing),
        ),
    }


def _memory(result: Result, mode: str, way: str) -> str:
    cost = result.cost(mode, way)
    return number(cost.peak_bytes / result.setup.logits_bytes if cost else None, ".3f")


def _time(result: Result, mode: str, way: str) -> str:
    cost, base = result.cost(mode, way), result.cost(mode, BASE)
    return number(cost.milliseconds / base.milliseconds if cost and base else None, ".2f")


def _errors_of(result: Result, mode: str, way: str) -> str:
    cost = result.cost(mode, way)
    return "{:.1e}, {:.1e}".format(*cost.details) if cost and cost.details else "–"


def _growth(growing: Sequence[Result]) -> Iterator[dict[str, str]]:
    costs = [result.costs[ALL_ROWS.name][DEFERRED] for result in growing]
    for result, cost in zip(growing, costs, strict=True):
        yield {
            "setup": str(result.setup),
            "float32 logits": f"{result.setup.logits_bytes >> 20} MiB",
            "memory, MiB": f"{cost.peak_bytes / 2**20:.0f}",
            "time": f"{cost.milliseconds / costs[0].milliseconds:.2f}",
        }


def _beside(result: Result) -> Iterator[dict[str, str]]:
    for name, cost in result.costs[ALL_ROWS.name].items():
        if name != HALF_KEPT:
            yield {
                "setup": str(result.setup),
                "head": name,
                "memory": _memory(result, ALL_ROWS.name, name),
                "time": _time(result, ALL_ROWS.name, name),
                "time, frozen head": _time(result, FROZEN.name, name),
                "log-probs, gradients: errors": _errors_of(result, ALL_ROWS.name, name),
                "entropy, gradient: errors": _errors_of(result, ENTROPY.name, name),
                "memory with the entropy's gradient": _memory(result, ENTROPY.name, name),
                "leaves out": "; ".join(_leaves_out(result, name, cost)) or "–",
            }


def _leaves_out(result: Result, name: str, cost: Cost) -> Iterator[str]:
    """Say what a head does not do, by what this run measured."""
    if not cost.details:
        return
    if name in (NAIVE, BASE):
        yield "materializes the logits"
        return
    if cost.details[0] > 1e-4:
        yield "the temperature" if cost.details[0] > 1e-2 else "exact values"
    entropy, frozen = result.cost(ENTROPY.name, name), result.cost(FROZEN.name, name)
    if entropy is None:
        yield "the entropy"
    elif entropy.details[1] > 0.1:
        yield "the entropy's gradient"
    elif entropy.peak_bytes > 1.5 * cost.peak_bytes:
        yield "the entropy's gradient in chunks"
    if frozen and frozen.details[0]:
        yield "the saving of a frozen weight"


def plot(results: Results, figure: Any) -> None:
    memory, duration = figure.subplots(2, 1)
    setups, first = results.large + results.setups, results.setups[0]
    peaks = {
        way.replace("`", ""): {
            str(result.setup): cost.peak_bytes / result.setup.logits_bytes
            for result in setups
            if (cost := result.cost(ALL_ROWS.name, way))
        }
        for way in WAYS
    }
    times = {
        way: {
            mode.name: cost.milliseconds / first.costs[mode.name][BASE].milliseconds
            for mode in MODES
            if (cost := first.cost(mode.name, way))
        }
        for way in WAYS
    }
    bars(memory, "peak beyond gradients, in float32 logits", peaks)
    bars(duration, "time, logits materialized with lean-loss = 1", times)
    duration.set_title(str(first.setup))
    figure.legend(*memory.get_legend_handles_labels(), loc="outside lower left")


BENCHMARK = Benchmark(measure, parts, plot, image="head_memory_and_time.svg", height=8)
