"""Bias, variance and memory of distillation objectives, on a problem whose answer is known."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl_patches.losses import (
    TopKDistribution,
    deferred_logits,
    full_vocabulary_divergence,
    vocab_parallel_log_probs,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)
from megatron_rl_patches.losses.objectives.topk_divergences import forward_kl, opd_advantages, reverse_kl
from megatron_rl_patches.testing import spawn_ranks
from tests.references.live_bytes import live_bytes

from .candidates import CHECKOUTS, definition, revisions
from .page import Benchmark, Parts, Table, number

K, HIDDEN = 16, 4096  # the hidden size is for the payload alone
NOISE = 0.5  # of the student's logits, in nats
#: Rows and vocabulary: of the problem in float64, and of the logits in float32 whose memory is measured.
PROBLEM, MEMORY = (256, 2000), (512, 32768)
QUICK = (8, 200)
SAMPLED, TRUNCATED, CLAMPED = "sampled token", "teacher's top-k", "teacher's top-k, clamped"
WITH_TAIL, REVERSE = "teacher's top-k with tail", "teacher's top-k with tail, reverse"
STUDENTS, FULL = "student's top-k with tail", "whole vocabulary"
#: The divergence that an objective stands for, and the bytes that a teacher sends per token.
OBJECTIVES = {
    SAMPLED: ("reverse KL", 4),
    TRUNCATED: ("forward KL", 8 * K),
    CLAMPED: ("forward KL", 8 * K),
    WITH_TAIL: ("forward KL", 8 * K),
    REVERSE: ("reverse KL", 8 * K),
    STUDENTS: ("reverse KL", 4 * K + 4),
    FULL: ("reverse KL", 2 * HIDDEN),
}


@dataclass(frozen=True)
class Row:
    """What one objective has; bias and variance are relative to the gradient of the divergence.

    Attributes:
        without_gradient: share of the tokens.
        memory: peak in forward and backward, in logits; not a number if it was not measured.
    """

    name: str
    bias: float
    variance: float
    without_gradient: float
    memory: float


class Problem(NamedTuple):
    """Logits ``[n, V]`` of student and teacher."""

    student: Tensor
    teacher: Tensor


def problem(rows: int, vocabulary: int, dtype: torch.dtype) -> Problem:
    """Return distributions that fall as a power of the rank, so that a part of them is in the tail."""
    noise = torch.randn(2, rows, vocabulary, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    teacher = -1.2 * torch.arange(1, vocabulary + 1, dtype=torch.float64).log() + 0.3 * noise[0]
    return Problem((teacher + NOISE * noise[1]).to(dtype), teacher.to(dtype))


#: From the student's logits to one value per row.
Objective = Callable[[Tensor], Tensor]


def objectives(of: Problem) -> dict[str, Objective]:
    """Return those that need no sample."""
    of_teacher, of_student = (vocab_parallel_topk(logits, K) for logits in (of.teacher, of.student))
    scored = vocab_parallel_log_probs_at(of.teacher, of_student.indices, with_tail=True)
    at_students_ids = TopKDistribution(of_student.indices, *scored)

    def at(x: Tensor, distribution: TopKDistribution) -> tuple[Tensor, Tensor]:
        return vocab_parallel_log_probs_at(x, distribution.indices, with_tail=True)

    def truncated(x: Tensor) -> Tensor:
        """As open-instruct computes it."""
        log_p = x.log_softmax(1).gather(1, of_teacher.indices)
        return (of_teacher.log_probs.exp() * (of_teacher.log_probs - log_p)).sum(1)

    return {
        TRUNCATED: truncated,
        CLAMPED: lambda x: truncated(x).clamp(min=0.0),
        WITH_TAIL: lambda x: forward_kl(*at(x, of_teacher), of_teacher),
        REVERSE: lambda x: reverse_kl(*at(x, of_teacher), of_teacher),
        STUDENTS: lambda x: reverse_kl(*at(x, of_student), at_students_ids),
        FULL: lambda x: full_vocabulary_divergence(x, of.teacher),
    }


def gradient(objective: Objective, student: Tensor) -> Tensor:
    logits = student.detach().requires_grad_()
    return torch.autograd.grad(objective(logits).sum(), logits)[0]


def measure(quick: bool) -> list[Row]:
    [rows] = spawn_ranks(_measure, 1, quick, timeout=1200)
    return rows


def _measure(quick: bool) -> list[Row]:
    of = problem(*(QUICK if quick else PROBLEM), torch.float64)
    log_q = of.teacher.log_softmax(1)
    exact = {
        "reverse KL": gradient(lambda x: (x.softmax(1) * (x.log_softmax(1) - log_q)).sum(1), of.student),
        "forward KL": gradient(lambda x: (log_q.exp() * (log_q - x.log_softmax(1))).sum(1), of.student),
    }
    memory = memories(problem(*(QUICK if quick else MEMORY), torch.float32))
    rows = [Row(SAMPLED, *_sampled(of.student, log_q, exact["reverse KL"]), 0.0, memory[SAMPLED])]
    for name, objective in objectives(of).items():
        measured, expected = gradient(objective, of.student), exact[OBJECTIVES[name][0]]
        bias = _norm(measured - expected) / _norm(expected)
        without_gradient = (measured == 0).all(1).double().mean().item()
        rows.append(Row(name, bias, 0.0, without_gradient, memory[name]))
    return rows


def _sampled(student: Tensor, log_q: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return bias and variance of the policy gradient of a sampled token, summed over all tokens."""
    log_p = student.log_softmax(1)
    p, weight = log_p.exp(), -opd_advantages(log_p, log_q)
    # A sample a has the gradient weight[a] * (onehot(a) - p).
    mean = p * weight - p * (p * weight).sum(1, keepdim=True)
    squares = weight**2 * (1 - 2 * p + (p**2).sum(1, keepdim=True))
    variance = (p * squares).sum() - (mean**2).sum()
    return _norm(mean - exact) / _norm(exact), variance.item() / _norm(exact) ** 2


def _norm(of: Tensor) -> float:
    return of.norm().item()


def memories(of: Problem) -> dict[str, float]:
    """Return the peak of each objective, of which the clamped one is measured on verl's own function."""
    hidden, weight = (torch.randn(len(rows), HIDDEN // 16) for rows in (of.student, of.student.T))
    tokens = torch.multinomial(of.student.softmax(1), 1, generator=torch.Generator().manual_seed(0))[:, 0]
    advantages = opd_advantages(*(vocab_parallel_log_probs(logits, tokens) for logits in of))
    computed = objectives(of)
    computed[SAMPLED] = lambda x: -advantages * vocab_parallel_log_probs(x, tokens)
    # The teacher's logits would be more to hold. A tile is as large a part of them as in real runs.
    teacher = deferred_logits(hidden, weight, tile_bytes=of.teacher.nbytes // 16)
    computed[FULL] = lambda x: full_vocabulary_divergence(x, teacher)
    del computed[CLAMPED]
    if os.environ.get(CHECKOUTS["verl"]):
        computed[CLAMPED] = verl(of)
    peaks = {}
    for name, objective in computed.items():
        step = partial(gradient, objective, of.student)
        step()  # compiles
        peaks[name] = live_bytes(step).peak / of.student.nbytes
    return dict.fromkeys(OBJECTIVES, math.nan) | peaks


def verl(of: Problem) -> Objective:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    file = Path(os.environ[CHECKOUTS["verl"]], "verl", "trainer", "distillation", "megatron", "losses.py")
    function: Any = definition(file, "_VocabParallelKLDivergence", "vocab_parallel_log_softmax")
    ids = vocab_parallel_topk(of.teacher, K)
    teacher = ids.log_probs[None], ids.indices[None], None
    return lambda x: function.apply(x[None], *teacher)[0][0].clamp(min=0.0)


def parts(measured: list[Row]) -> Parts:
    rows = [
        {
            "objective": row.name,
            "stands for": OBJECTIVES[row.name][0],
            "bias": f"{100 * row.bias:.1f}%",
            "variance": f"{row.variance:.1f}",
            "tokens without gradient": f"{100 * row.without_gradient:.0f}%",
            "memory": number(row.memory, ".2f"),
            "payload per token": f"{OBJECTIVES[row.name][1]:,} bytes",
        }
        for row in measured
    ]
    return {"objectives": Table(1, rows), "peers": revisions("Others", "verl")}


def is_met(measured: list[Row]) -> bool:
    """Return whether what is called exact is, and the tail takes away bias."""
    bias = {row.name: row.bias for row in measured}
    return max(bias[SAMPLED], bias[FULL]) < 1e-6 and bias[WITH_TAIL] < min(bias[TRUNCATED], bias[CLAMPED])


BENCHMARK = Benchmark(measure, parts, is_met=is_met)
