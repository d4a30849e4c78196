"""Memory, time and error of an output layer with its loss: logits that are made, and deferred ones.

    python -m benchmarks.bench_head [--quick] [--seconds S]

Each way takes turns with the others in one run; CPU time is given in that of the logits made with
``lean-loss``. Memory is the peak of what is allocated during forward and backward, without the gradients of
hidden states and weight, in float32 logits. Writes docs/benchmarks/head.md and a plot.

Heads of other frameworks stand beside ours where NEMO_RL_DIR, SKYRL_DIR, AREAL_DIR, TRL_DIR and
TRL_BEFORE_DIR (an unpacked wheel of a release before 1.13) name checkouts; the page says why one is left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_rl_patches.losses import (
    deferred_logits,
    vocab_parallel_log_probs,
)
from megatron_rl_patches.testing import spawn_ranks
from tests.unit.losses.live_bytes import live_bytes

from ._head_candidates import BASE, DEFERRED, NAIVE, Head, load_heads, revisions
from ._machine import description, stamp
from .bench_loss import WARM_HEAP

DOCS = Path(__file__).parents[1] / "docs"
PAGE, PLOT = DOCS / "benchmarks" / "head.md", DOCS / "images" / "head_memory_and_time.png"


@dataclass(frozen=True)
class Setup:
    rows: int
    hidden: int
    vocabulary: int
    dtype: torch.dtype

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

    @property
    def trains(self) -> bool:
        return self.trains_hidden or self.trains_weight


SETUPS = [
    Setup(1024, 1024, 32768, torch.float32),
    Setup(512, 512, 151936, torch.float32),
    Setup(512, 512, 151936, torch.bfloat16),
]
# Memory alone, at the sizes of real runs.
LARGE = [Setup(8192, 256, 65536, torch.float32), Setup(4096, 256, 151936, torch.bfloat16)]
# Memory and time, as rows and vocabulary grow.
GROWING = [
    Setup(rows, 256, vocabulary, torch.float32)
    for rows, vocabulary in ((1024, 32768), (2048, 32768), (4096, 32768), (1024, 65536), (1024, 131072))
]
QUICK = [Setup(256, 64, 8192, torch.float32)]
MODES = [
    Mode("all rows"),
    Mode("half of the rows", used_rows=0.5),
    Mode("frozen head", trains_weight=False),
    Mode("scoring", trains_hidden=False, trains_weight=False),
]
TEMPERATURE = 0.8


@dataclass
class Inputs:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    rows: slice | Tensor | None
    advantages: Tensor


def naive(x: Inputs) -> Tensor:
    """``log_softmax`` of float32 logits, as frameworks without such functions write it."""
    logits = linear(x.hidden, x.weight).float()
    logits = (logits if x.rows is None else logits[x.rows]) / TEMPERATURE
    return logits.log_softmax(-1).gather(1, x.targets[:, None]).squeeze(1)


def made(x: Inputs) -> Tensor:
    """Logits in float32, as Megatron's ``Float16Module`` returns them, and this package's loss."""
    logits = linear(x.hidden, x.weight).float()
    return vocab_parallel_log_probs(logits, x.targets, rows=x.rows, temperature=TEMPERATURE)


def deferred(x: Inputs, tile_bytes: int | None = None, keep_bytes: int = 0) -> Tensor:
    logits = deferred_logits(x.hidden, x.weight, tile_bytes=tile_bytes, keep_bytes=keep_bytes)
    return vocab_parallel_log_probs(logits, x.targets, rows=x.rows, temperature=TEMPERATURE)


def _half_kept(x: Inputs) -> Tensor:
    rows = len(x.targets)
    return deferred(x, keep_bytes=rows * len(x.weight) * x.hidden.element_size() // 2)


Way = Callable[[Inputs], Tensor]
HALF_KEPT = "deferred, half of the tiles kept"
WAYS: dict[str, Way] = {
    NAIVE: naive,
    BASE: made,
    DEFERRED: deferred,
    HALF_KEPT: _half_kept,
}


@dataclass
class Result:
    setup: Setup
    #: Mode -> way -> seconds.
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    #: Mode -> way -> bytes beyond gradients.
    peak: dict[str, dict[str, int]] = field(default_factory=dict)
    #: Way -> largest error of values and of gradients, against float64, relative to the largest value.
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def logits_bytes(self) -> int:
        return 4 * self.setup.rows * self.setup.vocabulary


def inputs_of(setup: Setup, mode: Mode, device: torch.device | None = None) -> Inputs:
    device = device or torch.device("cpu")
    options: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    hidden = torch.randn(setup.rows, setup.hidden, **options).to(setup.dtype)
    weight = (3 * torch.randn(setup.vocabulary, setup.hidden, **options) / setup.hidden**0.5).to(setup.dtype)
    n = int(setup.rows * mode.used_rows)
    rows = None
    if mode.used_rows < 1:
        # Responses stand between prompts: pieces, not one range.
        rows = torch.arange(setup.rows, device=device).view(-1, 16)[::2].flatten()[:n]
    targets = torch.randint(setup.vocabulary, (n,), **options)
    advantages = torch.randn(n, **options)
    return Inputs(
        hidden.requires_grad_(mode.trains_hidden),
        weight.requires_grad_(mode.trains_weight),
        targets,
        rows,
        advantages,
    )


def step(way: Callable[[Inputs], Tensor], x: Inputs, mode: Mode) -> list[Tensor]:
    """Forward and backward; return log-probabilities and gradients."""
    with torch.set_grad_enabled(mode.trains):
        log_probs = way(x)
    trained = [t for t in (x.hidden, x.weight) if t.requires_grad]
    gradients = torch.autograd.grad((log_probs * x.advantages).sum(), trained) if trained else ()
    return [log_probs.detach(), *gradients]


def measure(setups: Sequence[Setup], seconds: float, with_time: bool) -> list[Result]:
    torch.set_num_threads(1 if with_time else torch.get_num_threads())
    return [_measure(setup, seconds, with_time) for setup in setups]


def _measure(
    setup: Setup,
    seconds: float,
    with_time: bool,
    all_ways: Mapping[str, Way] = WAYS,
    modes: Sequence[Mode] = MODES,
) -> Result:
    result = Result(setup)
    for mode in modes if with_time else modes[:1]:
        x = inputs_of(setup, mode)
        gradients = sum(t.nbytes for t in (x.hidden, x.weight) if t.requires_grad)
        peaks, times = result.peak.setdefault(mode.name, {}), result.seconds.setdefault(mode.name, {})
        left_out = {HALF_KEPT} if not mode.trains else set() if with_time else {NAIVE}
        ways = {name: way for name, way in all_ways.items() if name not in left_out}
        for name, way in ways.items():
            step(way, x, mode)  # compiles
            peaks[name] = live_bytes(lambda: step(way, x, mode)).peak - gradients  # noqa: B023
        if not with_time:
            continue
        taken: dict[str, list[float]] = {name: [] for name in ways}
        end = time.perf_counter() + seconds * len(ways)
        while time.perf_counter() < end or len(taken[BASE]) < 3:
            for name, way in ways.items():
                start = time.process_time()
                step(way, x, mode)
                taken[name].append(time.process_time() - start)
        times.update({name: median(values) for name, values in taken.items()})
    if with_time:
        result.errors = _errors(setup, all_ways, _log_probs)
    return result


def measure_growth(setups: Sequence[Setup], seconds: float) -> list[Result]:
    ways = {BASE: made, DEFERRED: deferred}
    return [_measure(setup, seconds, True, ways, MODES[:1]) for setup in setups]


def _log_probs(x: Inputs, log_p: Tensor) -> Tensor:
    return log_p.gather(1, x.targets[:, None]).squeeze(1)


def _entropies(x: Inputs, log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p).sum(-1)


def _errors(
    setup: Setup, ways: Mapping[str, Way], exactly: Callable[[Inputs, Tensor], Tensor]
) -> dict[str, tuple[float, float]]:
    small = Setup(64, setup.hidden, setup.vocabulary, setup.dtype)
    x = inputs_of(small, MODES[0])
    exact = Inputs(
        x.hidden.detach().double().requires_grad_(),
        x.weight.detach().double().requires_grad_(),
        x.targets,
        x.rows,
        x.advantages.double(),
    )

    def reference(x: Inputs) -> Tensor:
        # In 16 bits the model's logits are what they are rounded to; gradients flow as if they were not.
        logits = linear(x.hidden, x.weight)
        if setup.dtype != torch.float32:
            rounded = linear(x.hidden.to(setup.dtype), x.weight.to(setup.dtype)).double()
            logits = logits + (rounded - logits).detach()
        return exactly(x, (logits / TEMPERATURE).log_softmax(-1))

    expected = step(reference, exact, MODES[0])
    errors = {}
    for name, way in ways.items():
        found = step(way, x, MODES[0])
        relative = [
            ((a.double() - b).abs().max() / b.abs().max()).item()
            for a, b in zip(found, expected, strict=True)
        ]
        errors[name] = relative[0], max(relative[1:])
    return errors


FROZEN = MODES[2]


@dataclass
class Beside:
    """What one run found of the heads of other frameworks and of ours."""

    results: list[Result] = field(default_factory=list)
    #: For each result, head -> errors of the entropies and of their gradient, and the peak with it, in bytes.
    entropies: list[dict[str, tuple[float, float, int]]] = field(default_factory=list)
    #: Head -> why it does not run here.
    missing: dict[str, str] = field(default_factory=dict)
    #: Heads that compute a frozen weight's gradient.
    computes_frozen: set[str] = field(default_factory=set)
    revisions: list[str] = field(default_factory=list)


def measure_beside(setups: Sequence[Setup], large: Sequence[Setup], seconds: float) -> Beside:
    heads, missing = load_heads()
    beside = Beside(missing=missing, revisions=revisions())
    ways = {name: _part(head, 0) for name, head in heads.items()}
    with_entropy = {name: _part(head, 1) for name, head in heads.items() if _has_entropy(head)}
    beside.computes_frozen = {name for name, way in ways.items() if _computes_frozen(QUICK[0], way)}
    for setup in large:
        beside.results.append(_measure(setup, seconds, False, ways))
        beside.entropies.append({})
    for setup in setups:
        result = _measure(setup, seconds, True, ways, (MODES[0], FROZEN))
        x = inputs_of(setup, MODES[0])
        gradients = x.hidden.nbytes + x.weight.nbytes
        errors = _errors(setup, with_entropy, _entropies)
        peaks = {name: live_bytes(lambda: step(way, x, MODES[0])).peak for name, way in with_entropy.items()}  # noqa: B023
        beside.results.append(result)
        beside.entropies.append({name: (*errors[name], peaks[name] - gradients) for name in errors})
    return beside


def _part(head: Head, number: int) -> Way:
    """Return the way to the head's log-probabilities, or with 1 to its entropies."""
    return lambda x: head(x.hidden, x.weight, x.targets, TEMPERATURE, number == 1)[number]


def _has_entropy(head: Head) -> bool:
    return len(head(torch.ones(2, 4), torch.ones(8, 4), torch.arange(2), 1.0, True)) == 2


def _computes_frozen(setup: Setup, way: Way) -> bool:
    """Say whether backward makes a gradient of the weight that nobody asked for."""
    x = inputs_of(Setup(8, setup.hidden, setup.vocabulary, setup.dtype), FROZEN)
    made: list[Tensor] = []

    def hook(gradients: Sequence[Tensor | None], _: Any) -> None:
        made.extend(g for g in gradients if g is not None and g.shape == x.weight.shape)

    log_probs = way(x)
    nodes = [log_probs.grad_fn]
    for node in nodes:
        if node is not None:
            node.register_hook(hook)
            nodes.extend(following for following, _ in node.next_functions)
    torch.autograd.grad(log_probs.sum(), x.hidden)
    return bool(made)


def _left_out(result: Result, name: str, entropy: tuple[float, float, int] | None) -> list[str]:
    """Say what a head does not do, by what this run measured."""
    if name in (NAIVE, BASE):
        return ["makes the logits"]
    error = result.errors[name][0]
    left_out = ["the temperature"] * (error > 1e-2) or ["exact values"] * (error > 1e-4)
    if entropy is None:
        left_out.append("the entropy")
    elif entropy[1] > 0.1:
        left_out.append("the entropy's gradient")
    elif entropy[2] > 1.5 * result.peak["all rows"][name]:
        left_out.append("the entropy's gradient in chunks")
    return left_out


def render_beside(beside: Beside) -> list[str]:
    lines = [
        "",
        "## Beside the chunked heads of others",
        "",
        "Each as its framework calls it, on one rank and one thread, in turns, in the units above; errors",
        f"at temperature {TEMPERATURE}. The last column says what this run shows: values that are not those",
        "at the temperature, or off by more than 1e-4; no entropy; an entropy whose gradient is missing, or",
        "takes the logits of all chunks at once; a frozen weight's gradient that is computed all the same.",
        "What takes more ranks, or a model, is not compared here.",
        "",
        "| setup | head | memory | time | time, frozen head | log-probs, gradients: errors "
        "| entropy, gradient: errors | memory with the entropy's gradient | leaves out |",
        f"|{' --- |' * 9}",
    ]
    for result, entropies in zip(beside.results, beside.entropies, strict=True):
        for name, peak in result.peak["all rows"].items():
            cells = [str(result.setup), name, f"{peak / result.logits_bytes:.3f}", *["–"] * 6]
            if result.errors:
                seconds = [result.seconds[mode] for mode in ("all rows", FROZEN.name)]
                cells[3:5] = [f"{of_mode[name] / of_mode[BASE]:.2f}" for of_mode in seconds]
                cells[5] = "{:.1e}, {:.1e}".format(*result.errors[name])
                entropy = entropies.get(name)
                if entropy is not None:
                    cells[6:8] = [
                        "{:.1e}, {:.1e}".format(*entropy),
                        f"{entropy[2] / result.logits_bytes:.3f}",
                    ]
                frozen = ["the saving of a frozen weight"] * (name in beside.computes_frozen)
                cells[8] = "; ".join([*_left_out(result, name, entropy), *frozen]) or "–"
            lines.append(f"| {' | '.join(cells)} |")
    if beside.revisions:
        lines += ["", f"Others: {', '.join(beside.revisions)}."]
    if beside.missing:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in beside.missing.items())
        lines += ["", f"Left out: {reasons}."]
    return lines


def render_growth(growing: Sequence[Result]) -> list[str]:
    lines = [
        "",
        "## Growth",
        "",
        "Deferred, all rows: peak beyond the gradients, and CPU time in that of the first.",
        "",
    ]
    lines += ["| setup | float32 logits | memory, MiB | time |", "| --- | --- | --- | --- |"]
    for result in growing:
        peak, seconds = (of["all rows"][DEFERRED] for of in (result.peak, result.seconds))
        first = growing[0].seconds["all rows"][DEFERRED]
        size = result.logits_bytes >> 20
        lines.append(f"| {result.setup} | {size} MiB | {peak / 2**20:.0f} | {seconds / first:.2f} |")
    return lines


def render(
    results: Sequence[Result], large: Sequence[Result], growing: Sequence[Result], beside: Beside
) -> str:
    lines = [
        "# The output layer and its loss",
        "",
        "Log-probabilities at a temperature, forward and backward, by `python -m benchmarks.bench_head`: the",
        "logits made in float32, as Megatron returns them, with plain autograd or with",
        "[`lean-loss`](../patches/lean-loss.md), and [deferred](../losses.md#logits-that-never-exist).",
        "",
        f"{description()}.",
        "",
        "![Memory and time](../images/head_memory_and_time.png)",
        "",
        "## Memory",
        "",
        "Peak beyond the gradients of hidden states and weight, in float32 logits; all rows.",
        "",
        f"| setup | {' | '.join(WAYS)} |",
        f"| --- |{' --- |' * len(WAYS)}",
    ]
    for result in [*large, *results]:
        peak = result.peak["all rows"]
        cells = [f"{peak[way] / result.logits_bytes:.3f}" if way in peak else "–" for way in WAYS]
        lines.append(f"| {result.setup} | {' | '.join(cells)} |")
    lines += ["", "## Time", "", "CPU time of one thread, in that of the logits made with `lean-loss`.", ""]
    lines += [f"| setup | rows | {' | '.join(WAYS)} |", f"| --- | --- |{' --- |' * len(WAYS)}"]
    for result in results:
        for mode, seconds in result.seconds.items():
            cells = [f"{seconds[way] / seconds[BASE]:.2f}" if way in seconds else "–" for way in WAYS]
            lines.append(f"| {result.setup} | {mode} | {' | '.join(cells)} |")
    lines += ["", "## Errors", ""]
    lines += ["Largest of log-probabilities, and of gradients, relative to the largest value; 64 rows.", ""]
    lines += [f"| setup | {' | '.join(WAYS)} |", f"| --- |{' --- |' * len(WAYS)}"]
    for result in results:
        cells = ["{:.1e}, {:.1e}".format(*result.errors[way]) for way in WAYS]
        lines.append(f"| {result.setup} | {' | '.join(cells)} |")
    lines += render_growth(growing)
    lines += render_beside(beside)
    return "\n".join(lines) + "\n"


def _dtype(result: Result) -> str:
    return str(result.setup.dtype).removeprefix("torch.")


def plot(results: Sequence[Result], large: Sequence[Result], file: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (memory, duration) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    width = 0.8 / len(WAYS)
    everything: list[Any] = [*large, *results]
    for number, way in enumerate(WAYS):
        label = way.replace("`", "")
        at = [i + number * width for i in range(len(everything))]
        peaks = [r.peak["all rows"].get(way, 0) / r.logits_bytes for r in everything]
        memory.bar(at, peaks, width, label=label)
        bars = [(i, s) for i, s in enumerate(results[0].seconds.items()) if way in s[1]]
        duration.bar(
            [i + number * width for i, _ in bars],
            [s[way] / s[BASE] for _, (_, s) in bars],
            width,
            label=label,
        )
    labels = [
        str(r.setup).replace(" × ", "\n× ").replace(f", {_dtype(r)}", f"\n{_dtype(r)}") for r in everything
    ]
    memory.set_xticks(range(len(everything)), labels, fontsize=6)
    memory.set_ylabel("peak beyond gradients, in float32 logits")
    duration.set_xticks(range(len(MODES)), [mode.name for mode in MODES])
    duration.set_ylabel("time, logits made with lean-loss = 1")
    duration.set_title(str(results[0].setup), fontsize=9)
    memory.legend(fontsize=7)
    stamp(figure)
    figure.savefig(file, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small shape; writes nothing")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each way and mode, at least 3 turns")
    options = parser.parse_args(arguments)
    setups, large = (QUICK, QUICK) if options.quick else (SETUPS, LARGE)
    [results] = spawn_ranks(measure, 1, setups, options.seconds, True, timeout=3600, env=WARM_HEAP)
    [of_large] = spawn_ranks(measure, 1, large, 0.0, False, timeout=3600)
    growing = QUICK if options.quick else GROWING
    [of_growing] = spawn_ranks(measure_growth, 1, growing, options.seconds, timeout=3600, env=WARM_HEAP)
    [beside] = spawn_ranks(measure_beside, 1, setups, large, options.seconds, timeout=3600, env=WARM_HEAP)
    page = render(results, of_large, of_growing, beside)
    print(page)
    if not options.quick:
        PAGE.write_text(page)
        plot(results, of_large, PLOT)


if __name__ == "__main__":
    main()
