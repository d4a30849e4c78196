"""Distillation over the whole vocabulary: memory, time and error, and what a top-k leaves out.

    TRL_DIR=... python -m benchmarks.bench_distillation [--quick]

TRL's chunked divergence stands beside ours where TRL_DIR names a checkout that has it. Writes
docs/benchmarks/distillation.md and a plot.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_rl_patches.losses import (
    TopKDistribution,
    deferred_logits,
    full_vocabulary_divergence,
    reverse_kl,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)
from megatron_rl_patches.testing import spawn_ranks
from tests.unit.losses.live_bytes import live_bytes

from . import _machine
from ._loss_candidates import _from_checkout as from_checkout
from ._loss_measure import _why as why
from ._loss_report import _table as table
from .bench_loss import WARM_HEAP

DOCS = Path(__file__).parents[1] / "docs"
PAGE, PLOT = DOCS / "benchmarks" / "distillation.md", DOCS / "images" / "distillation_bias.png"
TURNS, REFERENCE_ROWS, TEMPERATURE = 5, 16, 0.8
#: How often logits of student and teacher are needed: in forward and again in backward. Jensen-Shannon's
#: mixture needs both normalizers first.
PASSES = {"reverse_kl": 2, "forward_kl": 2, "jensen_shannon": 3}
DIVERGENCES = tuple(PASSES)
BETA = 0.5


@dataclass(frozen=True)
class Setup:
    """A student of hidden size ``hidden`` and a teacher of ``teacher_hidden``."""

    rows: int
    hidden: int
    teacher_hidden: int
    vocabulary: int

    def __str__(self) -> str:
        return f"[{self.rows}, {self.hidden}] and [{self.rows}, {self.teacher_hidden}] × {self.vocabulary}"


SETUPS = [Setup(512, 1024, 1024, 32768), Setup(128, 512, 1024, 151936)]
# Memory alone, of the reverse KL.
LARGE = [Setup(4096, 256, 256, 65536)]
QUICK = [Setup(128, 64, 96, 4096)]
# Vocabulary and rows of the distributions by which the bias of a top-k is measured, and the exponents of
# their power laws.
BIAS = (151936, 16)
EXPONENTS = (1.2, 1.6, 2.4)
KS = (16, 64, 256, 1024)
# Hidden size and vocabulary for which the bytes of a token are listed.
BYTES = (4096, 151936)


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    weights: Tensor

    @classmethod
    def of(cls, setup: Setup) -> Inputs:
        generator = torch.Generator().manual_seed(0)

        def layer(hidden: int) -> tuple[Tensor, Tensor]:
            states = torch.randn(setup.rows, hidden, generator=generator)
            return states, 3 * torch.randn(setup.vocabulary, hidden, generator=generator) / hidden**0.5

        student, teacher = layer(setup.hidden), layer(setup.teacher_hidden)
        weights = torch.rand(setup.rows, generator=generator)
        return cls(student[0].requires_grad_(), student[1].requires_grad_(), *teacher, weights)

    @property
    def gradient_bytes(self) -> int:
        return self.hidden.nbytes + self.weight.nbytes


#: From inputs and the name of a divergence to one value per row.
Way = Callable[[Inputs, str], Tensor]


def naive(x: Inputs, divergence: str) -> Tensor:
    """Write it as a formula of the log-softmax of both sides."""
    log_p = (linear(x.hidden, x.weight) / TEMPERATURE).log_softmax(-1)
    with torch.no_grad():
        log_q = (linear(x.teacher_hidden, x.teacher_weight) / TEMPERATURE).log_softmax(-1)
    return formula(log_p, log_q, divergence)


def formula(log_p: Tensor, log_q: Tensor, divergence: str) -> Tensor:
    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(-1)

    if divergence == "jensen_shannon":
        mixed = torch.stack([log_p, log_q]).logsumexp(0) - torch.tensor(2.0).log()
        return BETA * kl(log_q, mixed) + (1 - BETA) * kl(log_p, mixed)
    return kl(log_p, log_q) if divergence == "reverse_kl" else kl(log_q, log_p)


def made(x: Inputs, divergence: str) -> Tensor:
    with torch.no_grad():
        teacher = linear(x.teacher_hidden, x.teacher_weight)
    return ours(linear(x.hidden, x.weight), teacher, divergence)


def deferred(x: Inputs, divergence: str) -> Tensor:
    student = deferred_logits(x.hidden, x.weight)
    return ours(student, deferred_logits(x.teacher_hidden, x.teacher_weight), divergence)


def ours(student: Tensor, teacher: Tensor, divergence: str) -> Tensor:
    options: dict[str, Any] = {"divergence": divergence, "temperature": TEMPERATURE}
    return full_vocabulary_divergence(student, teacher, **options)


def trl() -> Way:
    function = from_checkout("TRL", "trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    betas = {"forward_kl": 0.0, "reverse_kl": 1.0, "jensen_shannon": BETA}

    def way(x: Inputs, divergence: str) -> Tensor:
        layers = x.hidden, x.weight, None, x.teacher_hidden, x.teacher_weight, None
        values: Tensor = function.apply(*layers, betas[divergence], TEMPERATURE)[0]
        return values

    return way


OURS: dict[str, Way] = {"formula, autograd": naive, "logits made": made, "deferred": deferred}


@dataclass
class Result:
    setup: Setup
    #: divergence -> milliseconds of the matrix products that it needs.
    products: dict[str, float] = field(default_factory=dict)
    #: (way, divergence) -> peak in bytes, and perhaps milliseconds and errors of values and gradients.
    costs: dict[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def measure(setups: Sequence[Setup], large: Sequence[Setup]) -> list[Result]:
    torch.set_num_threads(1)
    return [*(_measure(setup, True) for setup in setups), *(_measure(setup, False) for setup in large)]


def _measure(setup: Setup, with_time: bool) -> Result:
    result, ways = Result(setup), dict(OURS)
    try:
        ways["TRL"] = trl()
    except Exception as error:
        result.missing["TRL"] = why(error)
    x, small = Inputs.of(setup), Inputs.of(Setup(REFERENCE_ROWS, *list(vars(setup).values())[1:]))
    for divergence in DIVERGENCES if with_time else DIVERGENCES[:1]:
        peaks = {}
        for name, way in ways.items():
            step(way, small, divergence)  # compiles
            peaks[name] = live_bytes(lambda: step(way, x, divergence)).peak - x.gradient_bytes  # noqa: B023
        if not with_time:
            result.costs.update({(name, divergence): (peak,) for name, peak in peaks.items()})
            continue
        times: dict[str, list[float]] = {name: [] for name in ways}
        products = []
        for _ in range(TURNS):
            products.append(_time(lambda: _products(x, PASSES[divergence])))  # noqa: B023
            for name, way in ways.items():
                times[name].append(_time(lambda: step(way, x, divergence)))  # noqa: B023
        for name, way in ways.items():
            result.costs[name, divergence] = (
                peaks[name],
                1e3 * statistics.median(times[name]),
                *_errors(way, small, divergence),
            )
        result.products[divergence] = 1e3 * statistics.median(products)
    return result


def step(way: Way, x: Inputs, divergence: str) -> list[Tensor]:
    """Return values and gradients."""
    values = way(x, divergence)
    return [values.detach(), *torch.autograd.grad((values * x.weights).sum(), (x.hidden, x.weight))]


def _products(x: Inputs, passes: int) -> None:
    """Multiply what the divergence of deferred logits has to multiply, in tiles of the same size."""
    columns = max((64 << 20) // 4 // 2 // len(x.hidden), 1024)
    hidden, of_hidden = x.hidden.detach(), torch.zeros_like(x.hidden.detach())
    of_weight = torch.empty_like(x.weight.detach())
    for number in range(passes):
        for start in range(0, len(x.weight), columns):
            tile = slice(start, start + columns)
            weight = x.weight.detach()[tile]
            logits = hidden @ weight.T
            x.teacher_hidden @ x.teacher_weight[tile].T
            if number == passes - 1:  # backward
                of_hidden.addmm_(logits, weight)
                torch.mm(logits.T, hidden, out=of_weight[tile])


def _time(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def _errors(way: Way, x: Inputs, divergence: str) -> tuple[float, float]:
    """Return the largest errors of values and of gradients against float64, relative to the largest value."""
    exact = Inputs(
        x.hidden.detach().double().requires_grad_(),
        x.weight.detach().double().requires_grad_(),
        x.teacher_hidden.double(),
        x.teacher_weight.double(),
        x.weights.double(),
    )
    expected, measured = step(naive, exact, divergence), step(way, x, divergence)
    relative = [
        ((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(measured, expected, strict=True)
    ]
    return relative[0], max(relative[1:])


@dataclass(frozen=True)
class Bias:
    """A top-k beside the whole vocabulary, averaged over rows."""

    exponent: float
    k: int
    #: Probability that the student gives all other ids.
    tail: float
    exact: float
    top_k: float
    #: Of the gradient of the student's logits: its difference from the exact one, relative to that.
    gradient_error: float


def biases(vocabulary: int, rows: int, ks: Sequence[int]) -> list[Bias]:
    """Compare divergences of distributions with power-law tails, as those of language models have them."""
    generator = torch.Generator().manual_seed(1)
    ranks = torch.arange(1, vocabulary + 1, dtype=torch.float64)
    of_all = []
    for exponent in EXPONENTS:
        log_q = -exponent * ranks.log() + 0.5 * torch.randn(
            rows, vocabulary, generator=generator, dtype=torch.float64
        )
        # The student agrees with the teacher on the order, and less and less so towards rare ids.
        apart = 0.3 + 0.1 * ranks.log()
        student = log_q + apart * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
        log_q = log_q.log_softmax(1)
        exact, of_exact = _value_and_gradient(student, partial(_reverse_kl, log_q))
        for k in ks:
            ids = vocab_parallel_topk(student, k)
            at_ids = vocab_parallel_log_probs_at(log_q, ids.indices, with_tail=True)
            teacher = TopKDistribution(ids.indices, *at_ids)

            def of_top_k(logits: Tensor, teacher: TopKDistribution = teacher) -> Tensor:
                return reverse_kl(
                    *vocab_parallel_log_probs_at(logits, teacher.indices, with_tail=True), teacher
                )

            value, of_value = _value_and_gradient(student, of_top_k)
            error = (of_value - of_exact).norm() / of_exact.norm()
            tail = ids.tail_log_prob.exp().mean().item()
            of_all.append(Bias(exponent, k, tail, exact, value, error.item()))
    return of_all


def _reverse_kl(log_q: Tensor, logits: Tensor) -> Tensor:
    return formula(logits.log_softmax(1), log_q, "reverse_kl")


def _value_and_gradient(student: Tensor, divergence: Callable[[Tensor], Tensor]) -> tuple[float, Tensor]:
    leaf = student.clone().requires_grad_()
    value = divergence(leaf).mean()
    return value.item(), torch.autograd.grad(value, leaf)[0]


def render(results: Sequence[Result], bias: Sequence[Bias]) -> str:
    return "\n".join(
        [
            "# Distillation over the whole vocabulary",
            "",
            "`python -m benchmarks.bench_distillation`: a student and a teacher by hidden states and output",
            f"layers, in float32, at temperature {TEMPERATURE}, one rank, one thread.",
            f"{_machine.description()}.",
            "",
            "- Memory: peak of live bytes in forward and backward, without the gradients of hidden states",
            "  and weight, × the float32 logits of one side.",
            f"- CPU time: median of {TURNS} turns, × the matrix products that it needs, which take turns",
            "  with the others: logits of both sides in forward and again in backward, two gradients. The",
            "  mixture of Jensen-Shannon needs the normalizers of both sides first: their logits once more.",
            f"- Errors: against float64 over {REFERENCE_ROWS} rows, relative to the largest value.",
            "",
            *(line for result in results for line in _section(result)),
            "NeMo-RL's divergence from hidden states (NeMo-RL#3978) is not compared: the copy of NeMo-RL",
            "at hand is older.",
            "",
            *_bytes(),
            *_bias(bias),
            "Not measured here: GPUs.",
            "",
        ]
    )


def _section(result: Result) -> Iterator[str]:
    setup = result.setup
    one_side = 4 * setup.rows * setup.vocabulary
    yield from (f"## {setup}", "")
    if result.products:
        products = ", ".join(
            f"{ms:.0f} ms ({name.replace('_', ' ')})" for name, ms in result.products.items()
        )
        yield from (f"The products take {products}.", "")
    header = ["divergence", "way", "memory", "CPU time", "error of values", "error of gradients"]
    rows = [
        [
            divergence.replace("_", " "),
            way,
            f"{peak / one_side:.3f}",
            *(f"{taken / result.products[divergence]:.2f}" for taken in more[:1]),
            *(f"{error:.0e}" for error in more[1:]),
            *["–"] * (3 - len(more)),
        ]
        for (way, divergence), (peak, *more) in result.costs.items()
    ]
    yield from table(header, rows)
    yield ""
    if result.missing:
        yield "Left out: " + "; ".join(f"{name} ({reason})" for name, reason in result.missing.items()) + "."
        yield ""


def _bytes() -> Iterator[str]:
    hidden, vocabulary = BYTES
    yield from (
        "## Bytes of a teacher, per token",
        "",
        f"At a hidden size of {hidden} and a vocabulary of {vocabulary}. The output layer is kept once, not",
        f"for each token: {2 * hidden * vocabulary / 1e9:.2f} GB in bfloat16, / tp.",
        "",
    )
    sizes = {"logits, bfloat16": 2 * vocabulary, "hidden states, bfloat16": 2 * hidden}
    one_row = torch.zeros(1, max(KS))
    sizes |= {f"top-k and tail, K = {k}": vocab_parallel_topk(one_row, k).nbytes for k in KS}
    yield from table(["kept", "bytes per token"], [[name, f"{size:,}"] for name, size in sizes.items()])
    yield ""


def _bias(bias: Sequence[Bias]) -> Iterator[str]:
    vocabulary, rows = BIAS
    yield from (
        "## What a top-k leaves out",
        "",
        "Reverse KL on the student's top-k and the tail, and the exact one, in float64, over",
        f"{rows} rows of {vocabulary} ids. Probabilities fall with their rank as `rank ** -exponent`;",
        "student and teacher differ by noise that grows with the rank. The gradient is that of the student's",
        "logits, its error the difference from the exact one, relative to that.",
        "",
    )
    header = ["exponent", "K", "student's tail", "exact KL", "top-k KL", "KL left out", "gradient error"]
    yield from table(
        header,
        [
            [
                f"{one.exponent:g}",
                str(one.k),
                f"{one.tail:.2%}",
                f"{one.exact:.4f}",
                f"{one.top_k:.4f}",
                f"{1 - one.top_k / one.exact:.1%}",
                f"{one.gradient_error:.1%}",
            ]
            for one in bias
        ],
    )
    yield from ("", "![bias of a top-k](../images/distillation_bias.png)", "")


def plot(bias: Sequence[Bias], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, both = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    readings: tuple[tuple[str, Callable[[Bias], float]], ...] = (
        ("reverse KL left out", lambda one: 1 - one.top_k / one.exact),
        ("relative error of the gradient", lambda one: one.gradient_error),
    )
    for axes, (label, reading) in zip(both, readings, strict=True):
        for exponent in EXPONENTS:
            mine = [one for one in bias if one.exponent == exponent]
            axes.plot(
                [one.k for one in mine], [reading(one) for one in mine], "o-", label=f"rank ** -{exponent:g}"
            )
        axes.set(xlabel="K", xscale="log", ylabel=label, ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle("What a top-k with its tail leaves out of the divergence over the whole vocabulary")
    _machine.stamp(figure)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small shapes; writes nothing")
    quick = parser.parse_args(arguments).quick
    setups, large = (QUICK, []) if quick else (SETUPS, LARGE)
    [results] = spawn_ranks(measure, 1, setups, large, timeout=3600, env=WARM_HEAP)
    bias = biases(4096, 4, KS[:2]) if quick else biases(*BIAS, KS)
    page = render(results, bias)
    print(page)
    if not quick:
        PAGE.write_text(page)
        plot(bias, PLOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
