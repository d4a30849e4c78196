"""Divergences on k ids and a tail: what they are, and what holds for all distributions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import (
    TopKDistribution,
    forward_kl,
    generalized_kl,
    importance_weighted_reverse_kl,
    jensen_shannon,
    opd_advantages,
    reverse_kl,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)
from megatron_rl_patches.losses.logits.divergences import divergence_named
from megatron_rl_patches.losses.objectives.topk_divergences import of_buckets

INF = float("inf")
N = 5


def kl(p: Tensor, q: Tensor) -> Tensor:
    return torch.xlogy(p, p / q).sum(1)


def dense_jensen_shannon(p: Tensor, q: Tensor, beta: float) -> Tensor:
    m = beta * q + (1 - beta) * p
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


# Ours, and the same over whole distributions of student and teacher.
DIVERGENCES: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "reverse_kl": (reverse_kl, kl),
    "forward_kl": (forward_kl, lambda p, q: kl(q, p)),
    "jensen_shannon": (jensen_shannon, partial(dense_jensen_shannon, beta=0.5)),
    "jensen_shannon_0.1": (partial(jensen_shannon, beta=0.1), partial(dense_jensen_shannon, beta=0.1)),
    "generalized_kl": (generalized_kl, lambda p, q: kl(p, q)),
    "skewed_forward_kl": (
        partial(of_buckets, divergence_named("skewed_forward_kl", 0.2)),
        lambda p, q: kl(q, 0.2 * q + 0.8 * p),
    ),
    "skewed_reverse_kl": (
        partial(of_buckets, divergence_named("skewed_reverse_kl", 0.2)),
        lambda p, q: kl(p, 0.2 * q + 0.8 * p),
    ),
}
of_each = pytest.mark.parametrize("name", DIVERGENCES)


def cases(test: Any) -> Any:
    inputs = st.integers(0, 2**31), st.integers(2, 40), st.integers(1, 40), st.floats(0, 8), st.floats(0, 8)
    return settings(max_examples=30)(given(*inputs)(test))


def pair(seed: int, columns: int, spread: float, distance: float) -> tuple[Tensor, Tensor]:
    """Logits of a student and a teacher, float64."""
    generator = torch.Generator().manual_seed(seed)
    student, change = torch.randn(2, N, columns, generator=generator, dtype=torch.float64)
    return student * spread, student * spread + change * distance


def scored(logits: Tensor, indices: Tensor) -> TopKDistribution:
    return TopKDistribution(indices, *vocab_parallel_log_probs_at(logits, indices, with_tail=True))


def compared(name: str, student: Tensor, teacher: Tensor, k: int) -> Tensor:
    """At the student's top-k."""
    indices = vocab_parallel_topk(student, k).indices
    at_ids = vocab_parallel_log_probs_at(student, indices, with_tail=True)
    return DIVERGENCES[name][0](*at_ids, scored(teacher, indices))


@of_each
@cases
def test_never_negative_and_never_above_the_dense_one(
    name: str, seed: int, columns: int, k: int, spread: float, distance: float
) -> None:
    student, teacher = pair(seed, columns, spread, distance)
    found = compared(name, student, teacher, min(k, columns))
    dense = DIVERGENCES[name][1](student.softmax(1), teacher.softmax(1))
    assert (found >= -1e-15).all()
    assert (found <= dense * (1 + 1e-9) + 1e-12).all()
    if k >= columns:
        assert torch.allclose(found, dense, rtol=1e-9, atol=1e-12)
    # Next to the minimum, where the rounding of float32 is larger than the value.
    nearby = pair(seed, columns, spread, distance * 1e-5)
    assert (compared(name, *(x.float() for x in nearby), min(k, columns)) >= -1e-12).all()


@of_each
@cases
def test_zero_with_a_gradient_of_zero_where_they_agree(
    name: str, seed: int, columns: int, k: int, spread: float, distance: float
) -> None:
    student = pair(seed, columns, spread, distance)[0].float().requires_grad_()
    found = compared(name, student, student.detach(), min(k, columns))
    [gradient] = torch.autograd.grad(found.sum(), student)
    assert (found == 0).all()
    assert (gradient == 0).all()


@of_each
@cases
def test_the_gradient_is_the_dense_one_where_k_is_everything(
    name: str, seed: int, columns: int, k: int, spread: float, distance: float
) -> None:
    student, teacher = pair(seed, columns, min(spread, 3.0), min(distance, 3.0))
    student.requires_grad_()
    dense = DIVERGENCES[name][1]
    [found] = torch.autograd.grad(compared(name, student, teacher, columns).sum(), student)
    [expected] = torch.autograd.grad(dense(student.softmax(1), teacher.softmax(1)).sum(), student)
    assert torch.allclose(found, expected, rtol=1e-8, atol=1e-11)


@of_each
@pytest.mark.parametrize("k", [1, 3, 6])
def test_gradcheck(name: str, k: int) -> None:
    student, teacher = pair(3, 6, 1.0, 1.0)
    indices = vocab_parallel_topk(student, k).indices
    of_teacher = scored(teacher, indices)

    def divergence(log_probs: Tensor, tail: Tensor) -> Tensor:
        return DIVERGENCES[name][0](log_probs, tail, of_teacher)

    of_student = scored(student, indices)
    inputs = of_student.log_probs.requires_grad_(), of_student.tail_log_prob.clamp(min=-9).requires_grad_()
    assert torch.autograd.gradcheck(divergence, inputs)
    assert torch.autograd.gradgradcheck(divergence, inputs)
    assert torch.autograd.gradcheck(
        lambda logits: compared(name, logits, teacher, k).sum(), student.requires_grad_()
    )


@of_each
def test_nothing_is_nan_where_probabilities_are_zero(name: str) -> None:
    """Ruled out by both, by the student, by the teacher; and next to nothing."""
    student = torch.tensor([[0.0, -INF, -INF, -2.0, -150.0, -1e4, 1.0]], requires_grad=True)
    teacher = torch.tensor([[-1.0, -INF, -3.0, -INF, -1e4, -150.0, 1.0]])
    indices = torch.arange(7)[None]
    for ids in (indices, indices[:, :3], indices[:, 2:5], torch.tensor([[0, -100, 1]])):
        at_ids = vocab_parallel_log_probs_at(student, ids, with_tail=True)
        found = DIVERGENCES[name][0](*at_ids, scored(teacher, ids))
        [gradient] = torch.autograd.grad(found.sum(), student)
        assert found.isfinite().all()
        assert gradient.isfinite().all()


@of_each
def test_nan_spoils_its_own_token(name: str) -> None:
    student, teacher = (logits.requires_grad_() for logits in pair(6, 8, 1.0, 1.0))
    has_nan = torch.zeros(N, dtype=torch.bool)
    with torch.no_grad():
        student[1, 3] = teacher[4, 0] = torch.nan
    has_nan[[1, 4]] = True
    ids = torch.arange(3).expand(N, -1)
    at_ids = vocab_parallel_log_probs_at(student, ids, with_tail=True)
    found = DIVERGENCES[name][0](*at_ids, scored(teacher.detach(), ids))
    [gradient] = torch.autograd.grad(found.sum(), student)
    assert torch.equal(found.isnan(), has_nan)
    assert gradient[~has_nan].isfinite().all()


def test_ruled_out_by_both_adds_nothing() -> None:
    student, teacher = pair(1, 6, 1.0, 1.0)
    for logits in (student, teacher):
        logits[:, 4:] = -INF
    for name, (_, dense) in DIVERGENCES.items():
        expected = dense(student[:, :4].softmax(1), teacher[:, :4].softmax(1))
        assert torch.allclose(compared(name, student, teacher, 6), expected)


def test_what_only_the_teacher_rules_out_is_dear() -> None:
    """As dear as 10,000 nats, with a gradient away from it."""
    student = torch.zeros(1, 4, requires_grad=True)
    teacher = torch.tensor([[0.0, 0.0, 0.0, -INF]])
    found = compared("reverse_kl", student, teacher, 4)
    assert found.item() == pytest.approx(0.25 * 1e4, rel=1e-2)
    [gradient] = torch.autograd.grad(found.sum(), student)
    assert gradient[0, 3] > 1e3


def test_the_tail_is_what_generalized_kl_leaves_out() -> None:
    student, teacher = pair(5, 30, 2.0, 1.0)
    with_tail, without = (compared(name, student, teacher, 4) for name in ("reverse_kl", "generalized_kl"))
    assert (without < with_tail).all()
    p, q = student.softmax(1), teacher.softmax(1)
    ids = vocab_parallel_topk(student, 4).indices
    terms = (p * (p / q).log() - p + q).gather(1, ids)
    assert torch.allclose(without, terms.sum(1))


def test_importance_weighted_reverse_kl_starts_as_the_reverse_kl() -> None:
    """Value and gradient are its own while the student is the old policy; later the value is not."""
    student, teacher = pair(7, 30, 2.0, 1.0)
    student.requires_grad_()
    old = vocab_parallel_topk(student, 4)
    at_ids = vocab_parallel_log_probs_at(student, old.indices, with_tail=True)
    of_teacher = scored(teacher, old.indices)
    found = importance_weighted_reverse_kl(*at_ids, of_teacher, old)
    expected = reverse_kl(*at_ids, of_teacher)
    assert torch.allclose(found, expected)
    gradients = [
        torch.autograd.grad(value.sum(), student, retain_graph=True)[0] for value in (found, expected)
    ]
    assert torch.allclose(*gradients, atol=1e-12)

    later = student.detach() + torch.randn(30)
    of_later = scored(later, old.indices)
    found = importance_weighted_reverse_kl(of_later.log_probs, of_later.tail_log_prob, of_teacher, old)
    p_old = torch.cat([old.log_probs, old.tail_log_prob[:, None]], 1)
    p = torch.cat([of_later.log_probs, of_later.tail_log_prob[:, None]], 1)
    q = torch.cat([of_teacher.log_probs, of_teacher.tail_log_prob[:, None]], 1)
    assert torch.allclose(found, -(p_old.exp() * (p - p_old).exp() * (q - p_old)).sum(1))


def test_opd_advantages_are_the_gradient_of_the_reverse_kl_on_average() -> None:
    """The expectation over sampled tokens of advantage times score, term by term."""
    student, teacher = pair(2, 12, 1.0, 1.0)
    student.requires_grad_()
    log_p = student.log_softmax(1)
    advantages = opd_advantages(log_p, teacher.log_softmax(1))
    assert not advantages.requires_grad
    objective = -(log_p.exp().detach() * advantages * log_p).sum()
    [found] = torch.autograd.grad(objective, student)
    [expected] = torch.autograd.grad(compared("reverse_kl", student, teacher, 12).sum(), student)
    assert torch.allclose(found, expected, atol=1e-12)
    assert (opd_advantages(log_p, log_p) == 0).all()
    with pytest.raises(InvalidInputError, match="same sampled tokens"):
        opd_advantages(log_p, log_p[:2])


def test_jensen_shannon_is_between_the_two() -> None:
    student, teacher = pair(4, 30, 2.0, 2.0)
    indices = vocab_parallel_topk(student, 4).indices
    buckets, of_teacher = scored(student, indices), scored(teacher, indices)
    at_ids = buckets.log_probs, buckets.tail_log_prob
    assert torch.allclose(
        jensen_shannon(*at_ids, of_teacher, 1e-6) / 1e-6, forward_kl(*at_ids, of_teacher), rtol=1e-3
    )
    assert torch.allclose(
        jensen_shannon(*at_ids, of_teacher, 1 - 1e-6) / 1e-6, reverse_kl(*at_ids, of_teacher), rtol=1e-3
    )
    for beta in (0.0, 1.0, -0.5, float("nan")):
        with pytest.raises(InvalidInputError, match="forward_kl for 0"):
            jensen_shannon(*at_ids, of_teacher, beta)


def test_other_tokens_are_refused() -> None:
    student, teacher = pair(4, 30, 2.0, 2.0)
    found = vocab_parallel_topk(student, 4)
    with pytest.raises(InvalidInputError, match=r"\[5, 4\].*\[5, 3\]"):
        reverse_kl(found.log_probs, found.tail_log_prob, vocab_parallel_topk(teacher, 3))
