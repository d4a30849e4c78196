"""Divergences on k ids and a tail against their formulas, and what is peculiar to those over all ids.

tests/unit/losses/test_table.py has the formulas of the latter.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from megatron_rl_patches import losses
from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses.objectives.topk_divergences import bucket_divergence
from megatron_rl_patches.losses.vocab import compiling
from megatron_rl_patches.losses.vocab.divergences import DIVERGENCES, divergence_named
from tests.ranks import by_speed
from tests.references.dense import dense_divergence, random
from tests.references.losses import FULL_DIVERGENCES
from tests.unit.losses.test_table import gradients_of

T, H, V = 9, 6, 1100
BETA = 0.3
#: A mixture of both, and one with weights of the policy that sampled.
COMPILED = {"jensen_shannon", "importance_weighted_reverse_kl"}
of_each_that_is_not_negative = pytest.mark.parametrize(
    "name", [name for name in DIVERGENCES if name != "importance_weighted_reverse_kl"]
)


def dense(
    name: str, student: Tensor, teachers: Sequence[Tensor], weights: Sequence[float], old: Tensor, beta: float
) -> Tensor:
    """Return the formulas as they stand, in float64."""
    pairs = zip(teachers, weights, strict=True)
    log_q = torch.stack([x.double().log_softmax(1) + math.log(weight) for x, weight in pairs]).logsumexp(0)
    log_p, log_old = student.double().log_softmax(1), old.double().log_softmax(1)
    return dense_divergence(name, log_p, log_q, log_old, beta)


def at_ids(name: str, student: Tensor, teacher: Tensor, ids: Tensor, old: Tensor | None = None) -> Tensor:
    of_student, *of_others = (
        losses.vocab_parallel_log_probs_at(one, ids, with_tail=True)
        for one in (student, teacher, old)
        if one is not None
    )
    others = (losses.TopKDistribution(ids, *known) for known in of_others)
    return bucket_divergence(divergence_named(name, BETA), *of_student, *others)


def at_topk(name: str, student: Tensor, teacher: Tensor, k: int) -> Tensor:
    return at_ids(name, student, teacher, losses.vocab_parallel_topk(student, k).indices)


# --- for all distributions, on k ids and a tail


def pair(seed: int, columns: int, spread: float, distance: float) -> tuple[Tensor, Tensor]:
    """Logits of a student and a teacher, float64."""
    student, change = random(2, 5, columns, seed=seed)
    return student * spread, student * spread + change * distance


@of_each_that_is_not_negative
@settings(max_examples=30)
@given(st.integers(0, 2**31), st.integers(2, 40), st.integers(1, 40), st.floats(0, 8), st.floats(0, 8))
def test_never_negative_and_never_above_the_dense_one(
    name: str, seed: int, columns: int, k: int, spread: float, distance: float
) -> None:
    student, teacher = pair(seed, columns, spread, distance)
    found = at_topk(name, student, teacher, min(k, columns))
    expected = dense(name, student, [teacher], [1.0], teacher, BETA)
    assert (found >= -1e-15).all()
    assert (found <= expected * (1 + 1e-9) + 1e-12).all()
    if k >= columns:
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)
    # Next to the minimum, where the rounding of float32 is larger than the value.
    nearby = pair(seed, columns, spread, distance * 1e-5)
    assert (at_topk(name, *(x.float() for x in nearby), min(k, columns)) >= -1e-12).all()
    # Where they agree, value and gradient are zero.
    same = student.float().requires_grad_()
    found = at_topk(name, same, same.detach(), min(k, columns))
    [gradient] = torch.autograd.grad(found.sum(), same)
    assert not found.any() and not gradient.any()


@of_each_that_is_not_negative
def test_gradients_of_log_probs_that_do_not_add_up_to_one(name: str) -> None:
    log_probs, tail = -random(2, 2, 3, seed=1).abs(), -random(2, seed=2).abs()
    ids = torch.arange(3).expand(2, -1)
    teacher = losses.TopKDistribution(ids, log_probs[0], tail)

    def divergence(log_probs: Tensor, tail: Tensor) -> Tensor:
        return bucket_divergence(divergence_named(name, BETA), log_probs, tail, teacher)

    inputs = log_probs[1].clone().requires_grad_(), tail.flip(0).requires_grad_()
    assert torch.autograd.gradcheck(divergence, inputs) and torch.autograd.gradgradcheck(divergence, inputs)


def test_opd_advantages_are_the_gradient_of_the_reverse_kl_on_average() -> None:
    """The expectation over sampled tokens of advantage times score, term by term."""
    student, teacher = pair(2, 12, 1.0, 1.0)
    student.requires_grad_()
    log_p = student.log_softmax(1)
    advantages = losses.opd_advantages(log_p, teacher.log_softmax(1))
    assert not advantages.requires_grad
    objective = -(log_p.exp().detach() * advantages * log_p).sum()
    [found] = torch.autograd.grad(objective, student)
    [expected] = torch.autograd.grad(at_topk("reverse_kl", student, teacher, 12).sum(), student)
    assert torch.allclose(found, expected, atol=1e-12)
    with pytest.raises(InvalidInputError, match="same sampled tokens"):
        losses.opd_advantages(log_p, log_p[:2])


# --- both ways: what is ruled out, and NaN


@pytest.mark.parametrize("name", DIVERGENCES)
def test_nothing_is_nan_where_probabilities_are_zero(name: str) -> None:
    """Ruled out by both, by the student, by the teacher; and next to nothing."""
    inf = math.inf
    student = torch.tensor([[0.0, -inf, -inf, -2.0, -150.0, -1e4, 1.0]], requires_grad=True)
    teacher = torch.tensor([[-1.0, -inf, -3.0, -inf, -1e4, -150.0, 1.0]])
    ids = torch.arange(7)[None]
    parts = (ids, ids[:, :3], ids[:, 2:5], torch.tensor([[0, -100, 1]]))
    found = [at_ids(name, student, teacher, part, student.detach()) for part in parts]
    for values in found:
        [gradient] = torch.autograd.grad(values.sum(), student)
        assert values.isfinite().all() and gradient.isfinite().all()


@pytest.mark.parametrize(
    ("way", "name"),
    [*(("full", name) for name in FULL_DIVERGENCES), *(("buckets", name) for name in DIVERGENCES)],
)
def test_rows_with_nan_spoil_themselves_alone(way: str, name: str) -> None:
    student, teacher, old = (random(4, V, seed=seed) for seed in range(3))
    student[1, 3] = teacher[2, 4] = math.nan
    if way == "full":
        teacher[2, 4], student[3] = math.inf, -math.inf
    student.requires_grad_()
    ids = torch.arange(V).expand(4, -1)
    if way == "full":
        values = losses.full_vocabulary_divergence(student, teacher, divergence=name, beta=BETA, old=old)
    else:
        values = at_ids(name, student, teacher, ids, old if divergence_named(name).needs_old else None)
    is_nan = values.isnan()
    assert is_nan.tolist() == [False, True, True, way == "full"]
    (gradient,) = torch.autograd.grad(values, student, (~is_nan).double(), retain_graph=True)
    assert gradient[~is_nan].isfinite().all() and gradient[~is_nan].any(1).all()
    assert way == "buckets" or not gradient[is_nan].any()
    # A gradient that is asked for is no number there.
    (gradient,) = torch.autograd.grad(values.sum(), student)
    assert way == "buckets" or torch.equal(gradient.isnan().any(1), is_nan)


# --- over the whole vocabulary


def errors(values: Tensor, leaf: Tensor, expected: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return the largest error of each value, and of gradients relative to the largest of the row."""
    [found], [reference] = gradients_of([values], [leaf]), gradients_of([expected], [exact])
    of_gradient = (found - reference).abs().amax(1) / reference.abs().amax(1)
    return ((values - expected) / expected).abs().max().item(), of_gradient.max().item()


@pytest.mark.parametrize("name", FULL_DIVERGENCES)
def test_of_equal_distributions_value_and_gradient_are_zero(name: Any) -> None:
    student = random(T, V, seed=0, dtype=torch.float32).requires_grad_()
    values = losses.full_vocabulary_divergence(student, student, divergence=name, old=student)
    [gradient] = gradients_of([values], [student])
    assert values.abs().max() < 1e-15 and gradient.abs().max() < 1e-14


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl", "jensen_shannon"])
def test_small_divergences_have_correct_digits_in_float32(
    name: Any, temperature: float, is_deferred: bool
) -> None:
    """At any temperature: to divide logits first would round each of them."""
    teacher = random(T, V, seed=0, dtype=torch.float32) * 2 + 15
    slack = 1.0 if temperature == 1 else 1.5  # the temperature is rounded, too
    for scale in (1e-1, 1e-3, 5e-5):
        student = teacher + temperature * scale * random(T, V, seed=1, dtype=torch.float32)
        student.requires_grad_()
        exact = student.detach().double().requires_grad_()
        # Each row of deferred logits is a column of the weight, without a rounding; these are two tiles.
        deferred = losses.deferred_logits(torch.eye(T), student.T, tile_bytes=1 << 14)
        logits, options = deferred if is_deferred else student, {"beta": 0.3, "temperature": temperature}
        values = losses.full_vocabulary_divergence(logits, teacher, divergence=name, **options)
        of_teacher = teacher.double() / temperature
        expected = dense(name, exact / temperature, [of_teacher], [1.0], of_teacher, 0.3)
        assert scale > 1e-4 or expected.max() < 1e-8
        bound, of_tiles = slack * (1e-5 if name == "jensen_shannon" else 2e-6), 1e-3 if is_deferred else 0.0
        of_value, of_gradient = errors(values, student, expected, exact)
        assert of_value < max(bound, of_tiles) and of_gradient < max(slack * 2e-6, of_tiles)


@pytest.mark.skipif(not compiling._has_compiler("cpu"), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, when inductor is imported
@pytest.mark.parametrize("name", by_speed(FULL_DIVERGENCES, fast=(), nightly={*FULL_DIVERGENCES} - COMPILED))
def test_compiled_equals_the_dense_formulas(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are not compiled in; also where student and teacher are nearly the same."""
    monkeypatch.setattr(compiling, "WORTHWHILE_ELEMENTS", 0)
    monkeypatch.setattr(compiling.BlockFunction, "_give_up", lambda call, error: pytest.fail(str(error)))
    old, *teachers = (random(T, V, seed=seed, dtype=torch.float32) for seed in range(3))
    near = teachers[0] + 1e-3 * random(T, V, seed=3, dtype=torch.float32)
    masked = old * 2
    masked[:, : V // 2] = -3e4  # whole stretches of columns, or all but a few of one
    for beta, weights, student in (
        (0.5, [1.0], masked),
        (0.3, [1.0], near),
        (0.6, [0.2, 0.8], old * 2),
        (0.4, [0.7, 0.3], old * 2),
    ):
        student, exact = student.clone().requires_grad_(), student.double().requires_grad_()
        some = teachers[: len(weights)]
        options: dict[str, Any] = {"divergence": name, "beta": beta, "teacher_weights": weights, "old": old}
        values = losses.full_vocabulary_divergence(student, some, **options)
        expected = dense(name, exact.log_softmax(1).clamp(min=-1e4), some, weights, old, beta)
        assert max(errors(values, student, expected, exact)) < 3e-6


@pytest.mark.parametrize("inplace", [False, True])
def test_tensors_without_rows_are_not_taken_for_the_same_memory(inplace: bool) -> None:
    """Tensors without elements are all at the address 0."""
    student = torch.zeros(0, V, requires_grad=True) * 1
    values = losses.full_vocabulary_divergence(student, torch.zeros(0, V), inplace_backward=inplace)
    assert values.shape == (0,)
    values.sum().backward()
    assert inplace or student._version == 0


def test_the_last_part_of_the_columns_may_be_narrower() -> None:
    """A teacher's tiles cut the columns into 1024 and 776; the student's logits are large enough for that.

    By default a block is 1% of the logits, and both parts must have the same blocks.
    """
    n, width = 1000, 1800
    student = random(1, width, seed=0, dtype=torch.float32).expand(60_000, width)
    head = random(n, 2, seed=1, dtype=torch.float32), random(width, 2, seed=2, dtype=torch.float32)
    teacher = losses.deferred_logits(*head, tile_bytes=4 * n * 1024)
    values = losses.full_vocabulary_divergence(student, teacher, rows=slice(0, n))
    assert torch.allclose(values, losses.full_vocabulary_divergence(student[:n], linear(*head)), rtol=1e-5)


def test_a_teacher_may_have_been_scored_under_inference_mode() -> None:
    student = random(T, V, seed=0).requires_grad_()
    with torch.inference_mode():
        hidden, weight, logits = (random(*shape, seed=1) for shape in ((T, H), (V, H), (T, V)))
        rows, mask = torch.tensor([3, 1, 2]), random(3, V, seed=2) > 0
    teacher = losses.FullDistribution.from_hidden(hidden, losses.OutputHead(weight))
    for of_teacher in (logits, *teacher.logits()):
        value = losses.full_vocabulary_divergence(student, of_teacher)
        expected = losses.full_vocabulary_divergence(student, of_teacher.detach().clone())
        assert torch.equal(*(gradients_of([x], [student])[0] for x in (value, expected)))
    values = losses.vocab_parallel_log_probs(student, rows, rows=rows, keep_mask=mask)
    expected = losses.vocab_parallel_log_probs(student, rows, rows=rows.clone(), keep_mask=mask.clone())
    assert torch.equal(*(gradients_of([x], [student])[0] for x in (values, expected)))
    # An output layer that is frozen, and was loaded so.
    mine = random(T, H, seed=3).requires_grad_()
    log_probs = losses.vocab_parallel_log_probs(losses.deferred_logits(mine, weight), torch.arange(T))
    expected = losses.vocab_parallel_log_probs(linear(mine, weight.clone()), torch.arange(T))
    assert torch.allclose(*(gradients_of([x], [mine])[0] for x in (log_probs, expected)))
