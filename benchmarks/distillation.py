"""Distillation over the whole vocabulary: memory, time and error, and what a top-k leaves out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

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

from .candidates import Candidate, calls, checkout
from .measure import Call, Result, largest_error, on_ranks
from .page import Benchmark, join, left_out, number, table

REFERENCE_ROWS, TEMPERATURE = 16, 0.8
#: How often logits of student and teacher are needed: in forward and again in backward. Jensen-Shannon's
#: mixture needs both normalizers first.
PASSES = {"reverse_kl": 2, "forward_kl": 2, "jensen_shannon": 3}
BETA = 0.5
PRODUCTS = "products"


@dataclass(frozen=True)
class Setup:
    """A student of hidden size ``hidden`` and a teacher of ``teacher_hidden``."""

    rows: int
    hidden: int
    teacher_hidden: int
    vocabulary: int

    def __str__(self) -> str:
        return f"[{self.rows}, {self.hidden}] and [{self.rows}, {self.teacher_hidden}] × {self.vocabulary}"


SETUPS = (Setup(512, 1024, 1024, 32768), Setup(128, 512, 1024, 151936))
# Memory alone, of the reverse KL.
LARGE = (Setup(4096, 256, 256, 65536),)
QUICK = Setup(128, 64, 96, 4096)
# Vocabulary and rows of the distributions by which the bias of a top-k is measured, and the exponents of
# their power laws.
BIAS = (151936, 16)
EXPONENTS = (1.2, 1.6, 2.4)
KS = (16, 64, 256, 1024)
# Hidden size and vocabulary for which the bytes of a token are listed.
BYTES = (4096, 151936)


class Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    weights: Tensor


def inputs_of(setup: Setup) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def layer(hidden: int, trained: bool) -> tuple[Tensor, Tensor]:
        states = torch.randn(setup.rows, hidden, generator=generator)
        weight = 3 * torch.randn(setup.vocabulary, hidden, generator=generator) / hidden**0.5
        return states.requires_grad_(trained), weight.requires_grad_(trained)

    hidden, weight = layer(setup.hidden, trained=True)
    teacher_hidden, teacher_weight = layer(setup.teacher_hidden, trained=False)
    weights = torch.rand(setup.rows, generator=generator)
    return Inputs(hidden, weight, teacher_hidden, teacher_weight, weights)


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


def trl(module: Any, x: Inputs, divergence: str) -> Tensor:
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jensen_shannon": BETA}[divergence]
    layers = x.hidden, x.weight, None, x.teacher_hidden, x.teacher_weight, None
    values: Tensor = module.ChunkedDivergenceFunction.apply(*layers, beta, TEMPERATURE)[0]
    return values


CANDIDATES = (
    Candidate("formula, autograd", naive),
    Candidate("logits materialized", made),
    Candidate("deferred", deferred),
    Candidate("TRL", trl, checkout("TRL", "trl.kernels.chunked_divergence")),
)


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

    @property
    def left_out(self) -> float:
        """The share of the exact divergence."""
        return 1 - self.top_k / self.exact


@dataclass
class Results:
    setups: list[Result]
    biases: list[Bias]


def measure(quick: bool) -> Results:
    if quick:
        return Results([*on_ranks(_measure, [QUICK], 1), *on_ranks(_measure, [QUICK], 0)], biases(4096, 4))
    return Results([*on_ranks(_measure, SETUPS), *on_ranks(_measure, LARGE, turns=0)], biases(*BIAS))


def _measure(setup: Setup, turns: int) -> Result:
    """Measure all divergences; without turns, the memory of the reverse KL alone."""
    result, x = Result(setup), inputs_of(setup)
    for divergence, passes in PASSES.items() if turns else [("reverse_kl", 0)]:
        products = {PRODUCTS: Call(partial(_products, x, passes))} if turns else {}
        ways = calls(CANDIDATES, partial(_call, x, setup, divergence, turns), result.left_out)
        result.measure(divergence, products | ways, turns, clock=time.process_time)
    return result


def _call(x: Inputs, setup: Setup, divergence: str, turns: int, way: Way) -> Call:
    return Call(
        lambda _: step(way, x, divergence),
        results_bytes=x.hidden.nbytes + x.weight.nbytes,
        details=partial(_errors, way, setup, divergence) if turns else tuple,
    )


def step(way: Way, x: Inputs, divergence: str) -> list[Tensor]:
    """Return values and gradients."""
    values = way(x, divergence)
    return [values.detach(), *torch.autograd.grad((values * x.weights).sum(), (x.hidden, x.weight))]


def _products(x: Inputs, passes: int, _: object) -> None:
    """Multiply what the divergence of deferred logits has to multiply, in tiles of the same size."""
    columns = max((64 << 20) // 4 // 2 // len(x.hidden), 1024)
    hidden, of_hidden = x.hidden.detach(), torch.zeros_like(x.hidden.detach())
    of_weight = torch.empty_like(x.weight.detach())
    for turn in range(passes):
        for start in range(0, len(x.weight), columns):
            tile = slice(start, start + columns)
            weight = x.weight.detach()[tile]
            logits = hidden @ weight.T
            x.teacher_hidden @ x.teacher_weight[tile].T
            if turn == passes - 1:  # backward
                of_hidden.addmm_(logits, weight)
                torch.mm(logits.T, hidden, out=of_weight[tile])


def _errors(way: Way, setup: Setup, divergence: str) -> tuple[float, float]:
    """Return the largest errors of values and of gradients against float64."""
    x = inputs_of(replace(setup, rows=REFERENCE_ROWS))
    exact = Inputs(*(tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in x))
    values, *gradients = map(largest_error, step(way, x, divergence), step(naive, exact, divergence))
    return values, max(gradients)


def biases(vocabulary: int, rows: int) -> list[Bias]:
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
        for k in KS:
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


def parts(results: Results) -> dict[str, str]:
    rows = [
        {
            "exponent": f"{bias.exponent:g}",
            "K": str(bias.k),
            "student's tail": f"{bias.tail:.2%}",
            "exact KL": f"{bias.exact:.4f}",
            "top-k KL": f"{bias.top_k:.4f}",
            "KL left out": f"{bias.left_out:.1%}",
            "gradient error": f"{bias.gradient_error:.1%}",
        }
        for bias in results.biases
    ]
    hidden, vocabulary = BYTES
    sizes = {"logits, bfloat16": 2 * vocabulary, "hidden states, bfloat16": 2 * hidden}
    one_row = torch.zeros(1, max(KS))
    sizes |= {f"top-k and tail, K = {k}": vocab_parallel_topk(one_row, k).nbytes for k in KS}
    return {
        "divergences": join(*(_section(result) for result in results.setups)),
        "bytes": table({"kept": name, "bytes per token": f"{size:,}"} for name, size in sizes.items()),
        "bias": table(rows),
    }


def _section(result: Result) -> str:
    products, rows = [], []
    for divergence, costs in result.costs.items():
        name = divergence.replace("_", " ")
        of_products = costs[PRODUCTS].milliseconds if PRODUCTS in costs else math.nan
        if PRODUCTS in costs:
            products.append(f"{of_products:.0f} ms ({name})")
        for way, cost in costs.items():
            if way != PRODUCTS:
                value_error, gradient_error = cost.details or (None, None)
                one_side = 4 * result.setup.rows * result.setup.vocabulary
                rows.append(
                    {
                        "divergence": name,
                        "way": way,
                        "memory": f"{cost.peak_bytes / one_side:.3f}",
                        "CPU time": number(cost.milliseconds / of_products, ".2f"),
                        "error of values": number(value_error, ".0e"),
                        "error of gradients": number(gradient_error, ".0e"),
                    }
                )
    return join(
        f"## {result.setup}",
        f"The products take {', '.join(products)}." if products else "",
        table(rows),
        left_out(result.left_out),
    )


def plot(results: Results, figure: Any) -> None:
    missing, error = figure.subplots(2, 1)
    for exponent in EXPONENTS:
        of_exponent = [one for one in results.biases if one.exponent == exponent]
        ks, label = [one.k for one in of_exponent], f"rank ** -{exponent:g}"
        missing.plot(ks, [one.left_out for one in of_exponent], "o-", label=label)
        error.plot(ks, [one.gradient_error for one in of_exponent], "o-", label=label)
    missing.set(ylabel="reverse KL left out")
    error.set(ylabel="relative error of the gradient")
    for axes in (missing, error):
        axes.set(xlabel="K", xscale="log", ylim=(0, None))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle("What a top-k with its tail leaves out")


BENCHMARK = Benchmark(measure, parts, plot, image="distillation_bias.svg")
