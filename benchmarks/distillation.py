"""Distillation over the whole vocabulary: memory, time and error, and what a top-k leaves out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
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
from tests.references import heads

from .candidates import NEMO_RL, Candidate, calls, checkout, revisions
from .measure import Call, Result, largest_error, left_out, on_ranks, rows
from .page import Benchmark, Parts, Table

REFERENCE_ROWS, TEMPERATURE = 16, 0.8
#: How often logits of student and teacher are needed: in forward and again in backward. Jensen-Shannon's
#: mixture needs both normalizers first.
PASSES = {"reverse_kl": 2, "forward_kl": 2, "jensen_shannon": 3}
BETA = 0.5
PRODUCTS, ERRORS = "products", dict.fromkeys(("error of values", "error of gradients"), ".0e")


@dataclass(frozen=True)
class Setup(heads.Setup):
    """Student and teacher; memory is counted in the float32 logits of one side."""

    teacher_hidden: int = 1024

    def __str__(self) -> str:
        layers = f"[{self.rows}, {self.hidden}] and [{self.rows}, {self.teacher_hidden}] × {self.vocabulary}"
        return f"{layers}, {str(self.dtype).removeprefix('torch.')}"


SETUPS = (Setup(512, 1024, 32768), Setup(128, 512, 151936))
# Memory alone, of the reverse KL.
LARGE = [Setup(4096, 256, 65536, dtype, teacher_hidden=256) for dtype in (torch.float32, torch.bfloat16)]
QUICK = Setup(128, 64, 4096, teacher_hidden=96)
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
        states = torch.randn(setup.rows, hidden, generator=generator).to(setup.dtype)
        weight = 3 * torch.randn(setup.vocabulary, hidden, generator=generator) / hidden**0.5
        weight = weight.to(setup.dtype)
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
    if divergence == "jensen_shannon":
        mixed = torch.stack([log_p, log_q]).logsumexp(0) - math.log(2.0)
        return BETA * kl(log_q, mixed) + (1 - BETA) * kl(log_p, mixed)
    return kl(log_p, log_q) if divergence == "reverse_kl" else kl(log_q, log_p)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def ours(layer: Callable[[Tensor, Tensor], Tensor], x: Inputs, divergence: str) -> Tensor:
    with torch.no_grad():
        teacher = layer(x.teacher_hidden, x.teacher_weight)
    student = layer(x.hidden, x.weight)
    options: dict[str, Any] = {"divergence": divergence, "temperature": TEMPERATURE}
    return full_vocabulary_divergence(student, teacher, **options)


def trl(module: Any, x: Inputs, divergence: str) -> Tensor:
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jensen_shannon": BETA}[divergence]
    layers = x.hidden, x.weight, None, x.teacher_hidden, x.teacher_weight, None
    values: Tensor = module.ChunkedDivergenceFunction.apply(*layers, beta, TEMPERATURE)[0]
    return values


def nemo_rl_function() -> Any:
    """The divergence of NeMo-RL#3978, which older checkouts do not have."""
    return NEMO_RL().ChunkedDistributedReverseKLToFixedLogits


def nemo_rl(function: Any, x: Inputs, divergence: str) -> Tensor:
    """With the logits of all rows of both sides, as its loss has them, and its default of 1,024 rows."""
    if divergence != "reverse_kl":
        raise NotImplementedError("has the reverse KL alone")
    student = linear(x.hidden, x.weight)[None].div_(TEMPERATURE)
    with torch.no_grad():
        teacher = linear(x.teacher_hidden, x.teacher_weight)[None].div_(TEMPERATURE)
    values: Tensor = function.apply(student, teacher, 1024, dist.group.WORLD, False)
    return values[0]


CANDIDATES = (
    Candidate("formula, autograd", naive),
    Candidate("logits materialized", partial(ours, linear)),
    Candidate("deferred", partial(ours, deferred_logits)),
    Candidate("NeMo-RL", nemo_rl, nemo_rl_function),
    Candidate("TRL", trl, checkout("trl", "trl.kernels.chunked_divergence")),
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
    result, x = Result(setup, PRODUCTS), inputs_of(setup)
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
    options: dict[str, Any] = {"generator": torch.Generator().manual_seed(1), "dtype": torch.float64}
    ranks = torch.arange(1, vocabulary + 1, dtype=torch.float64)
    of_all = []
    for exponent in EXPONENTS:
        log_q = -exponent * ranks.log() + 0.5 * torch.randn(rows, vocabulary, **options)
        # The student agrees with the teacher on the order, and less and less so towards rare ids.
        apart = 0.3 + 0.1 * ranks.log()
        student = (log_q + apart * torch.randn(rows, vocabulary, **options)).requires_grad_()
        log_q = log_q.log_softmax(1)
        exact = kl(student.log_softmax(1), log_q).mean()
        [of_exact] = torch.autograd.grad(exact, student)
        for k in KS:
            ids = vocab_parallel_topk(student.detach(), k)
            at_ids = vocab_parallel_log_probs_at(log_q, ids.indices, with_tail=True)
            of_student = vocab_parallel_log_probs_at(student, ids.indices, with_tail=True)
            value = reverse_kl(*of_student, TopKDistribution(ids.indices, *at_ids)).mean()
            [gradient] = torch.autograd.grad(value, student)
            error = (gradient - of_exact).norm() / of_exact.norm()
            tail = ids.tail_log_prob.exp().mean().item()
            of_all.append(Bias(exponent, k, tail, exact.item(), value.item(), error.item()))
    return of_all


def parts(results: Results) -> Parts:
    of_biases = [
        {
            "exponent": f"{bias.exponent:g}",
            "K": str(bias.k),
            "student's tail": f"{bias.tail:.2%}",
            "exact KL": f"{bias.exact:.4f}",
            "top-k KL": f"{bias.top_k:.4f}",
            "KL left out": f"{1 - bias.top_k / bias.exact:.1%}",
            "gradient error": f"{bias.gradient_error:.1%}",
        }
        for bias in results.biases
    ]
    hidden, vocabulary = BYTES
    sizes = {"logits, bfloat16": 2 * vocabulary, "hidden states, bfloat16": 2 * hidden}
    one_row = torch.zeros(1, max(KS))
    sizes |= {f"top-k and tail, K = {k}": vocab_parallel_topk(one_row, k).nbytes for k in KS}
    return {
        "divergences": rows(results.setups, "divergence", "way", ERRORS),
        "peers": revisions("Others", "nemo-rl", "trl"),
        "left out": left_out(results.setups),
        "bytes": Table(1, [{"kept": name, "bytes per token": f"{size:,}"} for name, size in sizes.items()]),
        "bias": Table(2, of_biases),
    }


BENCHMARK = Benchmark(measure, parts)
