"""Bias and variance of the gradients of distillation objectives, on a problem whose answer is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl_patches.losses import (
    TopKDistribution,
    full_vocabulary_divergence,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)
from megatron_rl_patches.losses.objectives.topk_divergences import forward_kl, opd_advantages, reverse_kl

from .page import Benchmark, table

K, HIDDEN = 16, 4096  # the hidden size is for the payload alone
NOISE = 0.5  # of the student's logits, in nats


@dataclass(frozen=True)
class Row:
    name: str
    divergence: str  # that it stands for
    bias: float  # this and the variance are relative to the gradient of that divergence
    variance: float
    without_gradient: float  # share of the tokens
    bytes_per_token: int


def measure(quick: bool) -> list[Row]:
    rows, vocabulary = (8, 200) if quick else (256, 2000)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, rows, vocabulary, generator=generator, dtype=torch.float64)
    # Probabilities fall as a power of the rank, and so a part of them is in the tail.
    base = -1.2 * torch.arange(1, vocabulary + 1, dtype=torch.float64).log()
    teacher = base + 0.3 * noise[0]
    student = teacher + NOISE * noise[1]
    log_q = teacher.log_softmax(1)

    def gradient(objective: Callable[[Tensor], Tensor]) -> Tensor:
        logits = student.clone().requires_grad_()
        return torch.autograd.grad(objective(logits).sum(), logits)[0]

    exact = {
        "reverse KL": gradient(lambda x: (x.softmax(1) * (x.log_softmax(1) - log_q)).sum(1)),
        "forward KL": gradient(lambda x: (log_q.exp() * (log_q - x.log_softmax(1))).sum(1)),
    }
    of_teacher, of_student = vocab_parallel_topk(teacher, K), vocab_parallel_topk(student, K)
    scored = vocab_parallel_log_probs_at(teacher, of_student.indices, with_tail=True)
    at_students_ids = TopKDistribution(of_student.indices, *scored)

    def truncated(x: Tensor) -> Tensor:
        gap = of_teacher.log_probs - vocab_parallel_log_probs_at(x, of_teacher.indices)
        return (of_teacher.log_probs.exp() * gap).sum(1).clamp(min=0.0)

    def at(x: Tensor, distribution: TopKDistribution) -> tuple[Tensor, Tensor]:
        return vocab_parallel_log_probs_at(x, distribution.indices, with_tail=True)

    objectives = {
        ("teacher's top-k, truncated, clamped", "forward KL", 8 * K): truncated,
        ("teacher's top-k with tail", "forward KL", 8 * K): lambda x: forward_kl(
            *at(x, of_teacher), of_teacher
        ),
        ("student's top-k with tail", "reverse KL", 4 * K + 4): lambda x: reverse_kl(
            *at(x, of_student), at_students_ids
        ),
        ("whole vocabulary", "reverse KL", 2 * HIDDEN): lambda x: full_vocabulary_divergence(x, teacher),
    }
    measured = [_sampled(student, log_q, exact["reverse KL"])]
    for (name, divergence, payload), objective in objectives.items():
        got, want = gradient(objective), exact[divergence]
        nothing = (got == 0).all(1).double().mean().item()
        measured.append(Row(name, divergence, _norm(got - want) / _norm(want), 0.0, nothing, payload))
    return measured


def _sampled(student: Tensor, log_q: Tensor, exact: Tensor) -> Row:
    """The policy gradient of a sampled token, whose expectation over all tokens is summed."""
    log_p = student.log_softmax(1)
    p, weight = log_p.exp(), -opd_advantages(log_p, log_q)
    # A sample a has the gradient weight[a] * (onehot(a) - p).
    mean = p * weight - p * (p * weight).sum(1, keepdim=True)
    squares = weight**2 * (1 - 2 * p + (p**2).sum(1, keepdim=True))
    variance = (p * squares).sum() - (mean**2).sum()
    bias = _norm(mean - exact) / _norm(exact)
    return Row("sampled token", "reverse KL", bias, variance.item() / _norm(exact) ** 2, 0.0, 4)


def _norm(gradient: Tensor) -> float:
    return gradient.norm().item()


def parts(measured: list[Row]) -> dict[str, str]:
    return {
        "objectives": table(
            {
                "objective": row.name,
                "stands for": row.divergence,
                "bias": f"{100 * row.bias:.1f}%",
                "variance": f"{row.variance:.1f}",
                "tokens without gradient": f"{100 * row.without_gradient:.0f}%",
                "payload per token": f"{row.bytes_per_token:,} bytes",
            }
            for row in measured
        )
    }


def is_met(measured: list[Row]) -> bool:
    """Return whether what is called exact is, and the tail takes away bias."""
    sampled, truncated, with_tail, _, full = measured
    return max(sampled.bias, full.bias) < 1e-6 and with_tail.bias < truncated.bias


BENCHMARK = Benchmark(measure, parts, is_met=is_met)
