"""Divergences against their formulas: on k ids and a tail, and over the whole vocabulary, in tiles."""

from __future__ import annotations

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
from megatron_rl_patches.losses.logits import compiling
from megatron_rl_patches.losses.logits.divergences import DIVERGENCES, divergence_named
from megatron_rl_patches.losses.objectives.topk_divergences import of_buckets
from tests.references.dense import dense_divergence
from tests.unit.losses.logits.pairwise import pairwise
from tests.unit.losses.logits.sizes import Sizes

T, H, TEACHER_H, V = 9, 6, 4, 1100
BETA = 0.3
BOUND = {torch.float64: 1e-10, torch.float32: 2e-6}
#: For the whole vocabulary, and for buckets; and those that are never negative.
NAMES: tuple[Any, ...] = tuple(name for name in DIVERGENCES if name != "generalized_kl")
NOT_NEGATIVE = tuple(name for name in DIVERGENCES if name != "importance_weighted_reverse_kl")
of_each = pytest.mark.parametrize("name", NAMES)
of_each_that_is_not_negative = pytest.mark.parametrize("name", NOT_NEGATIVE)


def dense(
    name: str, student: Tensor, teachers: Sequence[Tensor], weights: Sequence[float], old: Tensor, beta: float
) -> Tensor:
    """Return the formulas as they stand, in float64."""
    pairs = zip(teachers, weights, strict=True)
    log_q = torch.stack([x.double().log_softmax(1) + math.log(weight) for x, weight in pairs]).logsumexp(0)
    log_p, log_old = student.double().log_softmax(1), old.double().log_softmax(1)
    return dense_divergence(name, log_p, log_q, log_old, beta)


def dense_of_one(name: str, student: Tensor, teacher: Tensor) -> Tensor:
    return dense(name, student, [teacher], [1.0], teacher, BETA)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def scored(logits: Tensor, indices: Tensor) -> losses.TopKDistribution:
    return losses.TopKDistribution(
        indices, *losses.vocab_parallel_log_probs_at(logits, indices, with_tail=True)
    )


def at_ids(name: str, student: Tensor, teacher: Tensor, ids: Tensor, old: Tensor | None = None) -> Tensor:
    of_student = losses.vocab_parallel_log_probs_at(student, ids, with_tail=True)
    others = [scored(one, ids) for one in (teacher, old) if one is not None]
    return of_buckets(divergence_named(name, BETA), *of_student, *others)


def at_topk(name: str, student: Tensor, teacher: Tensor, k: int) -> Tensor:
    """At the student's top-k."""
    return at_ids(name, student, teacher, losses.vocab_parallel_topk(student, k).indices)


def compared(way: str, name: Any, student: Tensor, teacher: Tensor, old: Tensor) -> Tensor:
    """Over the whole vocabulary, or with a bucket for each id."""
    if way == "full":
        return losses.full_vocabulary_divergence(student, teacher, divergence=name, beta=BETA, old=old)
    ids = torch.arange(student.shape[1]).expand(len(student), -1)
    return at_ids(name, student, teacher, ids, old if divergence_named(name).needs_old else None)


of_both_ways = pytest.mark.parametrize(
    ("way", "name"), [*(("full", name) for name in NAMES), *(("buckets", name) for name in DIVERGENCES)]
)


# --- for all distributions, on k ids and a tail


def cases(test: Any) -> Any:
    inputs = st.integers(0, 2**31), st.integers(2, 40), st.integers(1, 40), st.floats(0, 8), st.floats(0, 8)
    return settings(max_examples=30)(given(*inputs)(test))


def pair(seed: int, columns: int, spread: float, distance: float) -> tuple[Tensor, Tensor]:
    """Logits of a student and a teacher, float64."""
    student, change = random(2, 5, columns, seed=seed)
    return student * spread, student * spread + change * distance


@of_each_that_is_not_negative
@cases
def test_never_negative_and_never_above_the_dense_one(
    name: str, seed: int, columns: int, k: int, spread: float, distance: float
) -> None:
    student, teacher = pair(seed, columns, spread, distance)
    found = at_topk(name, student, teacher, min(k, columns))
    expected = dense_of_one(name, student, teacher)
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
@pytest.mark.parametrize("k", [1, 3, 6])
def test_gradcheck(name: str, k: int) -> None:
    student, teacher = pair(3, 6, 1.0, 1.0)
    indices = losses.vocab_parallel_topk(student, k).indices
    of_teacher, of_student = scored(teacher, indices), scored(student, indices)

    def divergence(log_probs: Tensor, tail: Tensor) -> Tensor:
        return of_buckets(divergence_named(name, BETA), log_probs, tail, of_teacher)

    inputs = of_student.log_probs.requires_grad_(), of_student.tail_log_prob.clamp(min=-9).requires_grad_()
    assert torch.autograd.gradcheck(divergence, inputs)
    assert torch.autograd.gradgradcheck(divergence, inputs)
    assert torch.autograd.gradcheck(
        lambda logits: at_topk(name, logits, teacher, k).sum(), student.requires_grad_()
    )


def test_the_tail_is_what_generalized_kl_leaves_out() -> None:
    student, teacher = pair(5, 30, 2.0, 1.0)
    p, q = student.softmax(1), teacher.softmax(1)
    ids = losses.vocab_parallel_topk(student, 4).indices
    terms = (p * (p / q).log() - p + q).gather(1, ids)
    assert torch.allclose(at_topk("generalized_kl", student, teacher, 4), terms.sum(1))


def test_importance_weighted_reverse_kl_starts_as_the_reverse_kl() -> None:
    """Value and gradient are its own while the student is the old policy; later the value is not."""
    student, teacher = pair(7, 30, 2.0, 1.0)
    student.requires_grad_()
    old = losses.vocab_parallel_topk(student, 4)
    of_student = losses.vocab_parallel_log_probs_at(student, old.indices, with_tail=True)
    of_teacher = scored(teacher, old.indices)
    found = losses.importance_weighted_reverse_kl(*of_student, of_teacher, old)
    expected = losses.reverse_kl(*of_student, of_teacher)
    assert torch.allclose(found, expected)
    gradients = [
        torch.autograd.grad(value.sum(), student, retain_graph=True)[0] for value in (found, expected)
    ]
    assert torch.allclose(*gradients, atol=1e-12)

    of_later = scored(student.detach() + torch.randn(30), old.indices)
    found = losses.importance_weighted_reverse_kl(of_later.log_probs, of_later.tail_log_prob, of_teacher, old)
    p_old, p, q = (
        torch.cat([one.log_probs, one.tail_log_prob[:, None]], 1) for one in (old, of_later, of_teacher)
    )
    assert torch.allclose(found, -(p_old.exp() * (p - p_old).exp() * (q - p_old)).sum(1))


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
    assert (losses.opd_advantages(log_p, log_p) == 0).all()
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
    if name in NAMES:
        found.append(compared("full", name, student, teacher, student.detach()))
    for values in found:
        [gradient] = torch.autograd.grad(values.sum(), student)
        assert values.isfinite().all()
        assert gradient.isfinite().all()


@of_both_ways
def test_ruled_out_by_both_adds_nothing(way: str, name: str) -> None:
    student, teacher = pair(1, 6, 1.0, 1.0)
    expected = dense_of_one(name, student[:, :4], teacher[:, :4])
    for logits in (student, teacher):
        logits[:, 4:] = -math.inf
    assert torch.allclose(compared(way, name, student, teacher, teacher), expected)


@pytest.mark.parametrize("way", ["full", "buckets"])
def test_what_only_the_teacher_rules_out_is_dear(way: str) -> None:
    """As dear as 10,000 nats, with a gradient away from it."""
    student = random(3, V, seed=0).requires_grad_()
    teacher = random(3, V, seed=1).index_fill_(1, torch.tensor([5]), -math.inf)
    found = compared(way, "reverse_kl", student, teacher, teacher)
    assert (found - 1e4 * student.softmax(1)[:, 5]).abs().max() < 2
    [gradient] = torch.autograd.grad(found.sum(), student)
    assert (gradient[:, 5] > 0.9e4 * student.softmax(1)[:, 5]).all()


@of_both_ways
def test_rows_with_nan_spoil_themselves_alone(way: str, name: str) -> None:
    student, teacher, old = (random(4, V, seed=seed) for seed in range(3))
    student[1, 3] = teacher[2, 4] = math.nan
    if way == "full":
        teacher[2, 4], student[3] = math.inf, -math.inf
    student.requires_grad_()
    values = compared(way, name, student, teacher, old)
    is_nan = values.isnan()
    assert is_nan.tolist() == [False, True, True, way == "full"]
    (gradient,) = torch.autograd.grad(values, student, (~is_nan).double(), retain_graph=True)
    assert gradient[~is_nan].isfinite().all() and gradient[~is_nan].any(1).all()
    assert way == "buckets" or not gradient[is_nan].any()
    # A gradient that is asked for is no number there.
    (gradient,) = torch.autograd.grad(values.sum(), student)
    assert way == "buckets" or torch.equal(gradient.isnan().any(1), is_nan)


# --- over the whole vocabulary


def backward(values: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 2, len(values), dtype=values.dtype)
    return torch.autograd.grad(values, inputs, weights)


def errors(values: Tensor, leaf: Tensor, expected: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return the largest error of each value, and of gradients relative to the largest of the row."""
    [found], [reference] = backward(values, leaf), backward(expected, exact)
    of_gradient = (found - reference).abs().amax(1) / reference.abs().amax(1)
    return ((values - expected) / expected).abs().max().item(), of_gradient.max().item()


CASES: dict[str, Sequence[Any]] = {
    "divergence": NAMES,
    "student": ["materialized", "deferred"],
    "teacher": ["materialized", "deferred"],
    "teachers": [1, 2],
    "dtype": list(BOUND),
    "rows": [None, slice(2, 7), torch.tensor([8, 0, 3])],
    "temperature": [1.0, 0.7],
    "tile_bytes": [None, 4096, 512],
    "block_bytes": [None, 1],
}


@pytest.mark.parametrize("case", pairwise(CASES), ids=lambda case: f"{case['divergence']}, {case['student']}")
def test_equals_the_dense_formulas(case: dict[str, Any]) -> None:
    dtype, rows, temperature = case["dtype"], case["rows"], case["temperature"]
    index = slice(None) if rows is None else rows
    hidden = random(T, H, seed=0, dtype=dtype).requires_grad_()
    weight = random(V, H, seed=1, dtype=dtype).requires_grad_()
    n, number = len(hidden[index]), case["teachers"]
    heads = [(random(n, h, seed=h, dtype=dtype), random(V, h, seed=h + 9, dtype=dtype)) for h in (4, 5)]
    others = [*heads[:number], (hidden.detach()[index] + 0.1, weight.detach())]  # the last is the old policy
    shares = [0.3, 0.7] if number == 2 else [1.0]

    def logits(kind: str, hidden: Tensor, weight: Tensor) -> Tensor:
        if kind == "materialized":
            return linear(hidden, weight)
        return losses.deferred_logits(hidden, weight, tile_bytes=case["tile_bytes"])

    student = logits(case["student"], hidden, weight)
    *teachers, old = (logits(case["teacher"], *head) for head in others)
    options = {"divergence": case["divergence"], "beta": BETA, "rows": rows, "temperature": temperature}
    options |= {"old": old, "block_bytes": case["block_bytes"]}
    if number == 2:
        values = losses.full_vocabulary_divergence(student, teachers, teacher_weights=[3, 7], **options)
    else:
        values = losses.full_vocabulary_divergence(student, teachers[0], **options)
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    *of_teachers, of_old = (linear(*(x.double() for x in head)) / temperature for head in others)
    of_student = linear(*exact)[index] / temperature
    expected = dense(case["divergence"], of_student, of_teachers, shares, of_old, BETA)
    assert values.dtype == dtype
    largest = max(expected.abs().max().item(), 1.0)
    assert (values - expected).abs().max() <= BOUND[dtype] * largest
    for mine, reference in zip(backward(values, hidden, weight), backward(expected, *exact), strict=True):
        assert (mine - reference).abs().max() <= 1.5 * BOUND[dtype] * reference.abs().max()
    for one in (student, *teachers):
        assert not isinstance(one, losses.DeferredLogits) or one.is_deferred


@pytest.mark.parametrize("materialized", [False, True])
@of_each
def test_of_equal_distributions_value_and_gradient_are_zero(name: Any, materialized: bool) -> None:
    hidden = random(T, H, seed=0, dtype=torch.float32).requires_grad_()
    weight = random(V, H, seed=1, dtype=torch.float32).requires_grad_()
    student = linear(hidden, weight) if materialized else losses.deferred_logits(hidden, weight)
    values = losses.full_vocabulary_divergence(student, student, divergence=name, old=student)
    assert values.abs().max() < 1e-15
    assert all(gradient.abs().max() < 1e-14 for gradient in backward(values, hidden, weight))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl", "jensen_shannon"])
def test_small_divergences_have_correct_digits_in_float32(name: Any, temperature: float) -> None:
    """At any temperature: to divide logits first would round each of them."""
    teacher = random(T, V, seed=0, dtype=torch.float32) * 2 + 15
    slack = 1.0 if temperature == 1 else 1.5  # the temperature is rounded, too
    for scale in (1e-1, 1e-3, 5e-5):
        student = teacher + temperature * scale * random(T, V, seed=1, dtype=torch.float32)
        student.requires_grad_()
        exact = student.detach().double().requires_grad_()
        values = losses.full_vocabulary_divergence(
            student, teacher, divergence=name, beta=0.3, temperature=temperature
        )
        of_teacher = teacher.double() / temperature
        expected = dense(name, exact / temperature, [of_teacher], [1.0], of_teacher, 0.3)
        assert scale > 1e-4 or expected.max() < 1e-8
        bound = slack * (1e-5 if name == "jensen_shannon" else 2e-6)
        of_value, of_gradient = errors(values, student, expected, exact)
        assert of_value < bound and of_gradient < slack * 2e-6


@pytest.mark.parametrize("name", ["jensen_shannon", "skewed_forward_kl"])
def test_mixtures_have_correct_digits_where_the_student_rules_ids_out_in_float32(name: Any) -> None:
    student = random(T, V, seed=0, dtype=torch.float32)
    student[:, V // 2 :] -= 9000.0
    teacher = random(T, V, seed=1, dtype=torch.float32)
    values = losses.full_vocabulary_divergence(student, teacher, divergence=name, beta=0.3)
    expected = dense(name, student, [teacher], [1.0], teacher, 0.3)
    assert ((values - expected) / expected).abs().max() < 1e-6


@pytest.mark.slow
@pytest.mark.skipif(not compiling._has_compiler("cpu"), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, when inductor is imported
@of_each
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


@pytest.mark.parametrize("teachers", [1, 2])
@of_each
def test_the_gradient_is_that_of_the_value_where_the_student_rules_ids_out(name: Any, teachers: int) -> None:
    """The student's log-probability there is a constant."""
    student = random(3, V, seed=0)
    student[0, 5:9] = student[1, ::2] = -math.inf
    others = [random(3, V, seed=1 + number) for number in range(teachers)]
    others[0][2, 7] = -math.inf

    def loss(x: Tensor) -> Tensor:
        return losses.full_vocabulary_divergence(x, others, divergence=name, old=others[0])

    leaf = student.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf).sum(), leaf)
    for column in (0, 5, 7, 8):
        step = torch.zeros_like(student)
        step[:, column] = 1e-5
        slope = (loss(student + step) - loss(student - step)) / 2e-5
        torch.testing.assert_close(gradient[:, column], slope, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("masked", ["student", "teacher", "old"])
@of_each
def test_large_negative_logits_count_as_ruled_out_however_columns_are_cut(
    name: Any, masked: str, dtype: torch.dtype
) -> None:
    """A mask covers whole tiles, or a part of one."""
    names = ("student", "teacher", "old")
    for mask in (-3e3, -1e4, -1e5, -1e9, torch.finfo(torch.bfloat16).min, torch.finfo(dtype).min):
        for columns in (slice(0, 512), slice(256, V), slice(300, 310)):
            logits = {one: random(3, V, seed=seed, dtype=dtype) for seed, one in enumerate(names)}
            logits[masked][:, columns] = mask
            exact = logits["student"].double().requires_grad_()
            log_p, log_q, log_old = (
                x.double().log_softmax(1).clamp(min=-1e4) for x in (exact, logits["teacher"], logits["old"])
            )
            expected = dense(name, log_p, [log_q], [1.0], log_old, BETA)
            (reference,) = backward(expected, exact)
            for tile_bytes in (None, 3 * 256 * dtype.itemsize):
                leaf = logits["student"].T.contiguous().requires_grad_()
                student, teacher, old = (
                    losses.deferred_logits(torch.eye(3, dtype=dtype), weight, tile_bytes=tile_bytes)
                    for weight in (leaf, logits["teacher"].T.contiguous(), logits["old"].T.contiguous())
                )
                values = losses.full_vocabulary_divergence(
                    student, teacher, old=old, divergence=name, beta=BETA
                )
                assert ((values - expected) / expected.abs().clamp(min=1.0)).abs().max() < BOUND[dtype]
                (gradient,) = backward(values, leaf)
                off = (gradient.T - reference).abs().amax(1) / reference.abs().amax(1)
                assert off.max() < 3 * BOUND[dtype]


@pytest.mark.parametrize("inplace", [False, True])
def test_tensors_without_rows_are_not_taken_for_the_same_memory(inplace: bool) -> None:
    """Tensors without elements are all at the address 0."""
    student = torch.zeros(0, V, requires_grad=True) * 1
    values = losses.full_vocabulary_divergence(student, torch.zeros(0, V), inplace_backward=inplace)
    assert values.shape == (0,)
    values.sum().backward()
    assert inplace or student._version == 0


@of_each
def test_a_tile_without_the_teacher_costs_the_same_as_columns_of_one(name: Any) -> None:
    hidden, weight = random(T, H, seed=0).requires_grad_(), random(V, H, seed=1)
    bias = torch.zeros(V, dtype=torch.float64).index_fill_(0, torch.arange(700, V), -math.inf)
    teacher_hidden, of_tiles = random(T, H, seed=2), []
    for tile_bytes in (None, 2000):
        student = losses.deferred_logits(hidden, weight, tile_bytes=tile_bytes)
        teacher = losses.deferred_logits(teacher_hidden, weight, bias=bias)
        values = losses.full_vocabulary_divergence(student, teacher, divergence=name, old=student.detach())
        of_tiles.append((values, *backward(values, hidden)))
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(*of_tiles, strict=True))
    if name == "reverse_kl":
        ruled_out = linear(hidden, weight).softmax(1)[:, 700:].sum(1)
        assert (of_tiles[0][0] / (1e4 * ruled_out) - 1).abs().max() < 1e-2


def test_a_teacher_without_weight_is_not_read() -> None:
    student, teacher = random(T, V, seed=0), random(T, V, seed=1)
    spoiled = torch.full_like(teacher, math.nan)
    values = losses.full_vocabulary_divergence(student, [teacher, spoiled], teacher_weights=[1, 0])
    assert torch.equal(values, losses.full_vocabulary_divergence(student, teacher))


@pytest.mark.parametrize("materialized", [False, True])
def test_vocabularies_that_are_padded_differently(materialized: bool) -> None:
    ids, widths = 1000, (1024, 1050)
    heads = [(random(T, H, seed=w), random(w, H, seed=w + 1).requires_grad_()) for w in widths]
    student, teacher = (
        linear(*head) if materialized else losses.deferred_logits(*head, tile_bytes=2000) for head in heads
    )
    expected = dense(
        "reverse_kl", linear(*heads[0])[:, :ids], [linear(*heads[1])[:, :ids]], [1.0], student, 0
    )
    values = losses.full_vocabulary_divergence(student, teacher, num_ids=ids)
    assert torch.allclose(values, expected, rtol=1e-10)
    weight = heads[0][1]
    mine, reference = backward(values, weight)[0], backward(expected, weight)[0]
    assert torch.allclose(mine, reference, atol=1e-12) and not mine[ids:].any()
    with pytest.raises(InvalidInputError, match="need num_ids"):
        losses.full_vocabulary_divergence(student, teacher)
    with pytest.raises(InvalidInputError, match="num_ids is 1030, expected from 1 to 1024"):
        losses.full_vocabulary_divergence(student, teacher, num_ids=1030)


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


def test_no_tensor_of_rows_and_vocabulary() -> None:
    hidden, weight = random(64, H, seed=0).requires_grad_(), random(V, H, seed=1).requires_grad_()
    teachers = [losses.deferred_logits(random(64, 4, seed=s), random(V, 4, seed=s)) for s in (2, 3)]
    for name in NAMES:
        with Sizes() as sizes:
            student = losses.deferred_logits(hidden, weight, tile_bytes=64 * 1024)
            values = losses.full_vocabulary_divergence(student, teachers, divergence=name, old=student)
            values.sum().backward()
        assert sizes.largest < 64 * V / 4


def test_a_teacher_may_have_been_scored_under_inference_mode() -> None:
    student = random(T, V, seed=0).requires_grad_()
    with torch.inference_mode():
        hidden, weight, logits = (random(*shape, seed=1) for shape in ((T, H), (V, H), (T, V)))
        rows, mask = torch.tensor([3, 1, 2]), random(3, V, seed=2) > 0
    teacher = losses.FullDistribution.from_hidden(hidden, losses.OutputHead(weight))
    for of_teacher in (logits, *teacher.logits()):
        value = losses.full_vocabulary_divergence(student, of_teacher)
        expected = losses.full_vocabulary_divergence(student, of_teacher.detach().clone())
        assert torch.equal(*(backward(x, student)[0] for x in (value, expected)))
    values = losses.vocab_parallel_log_probs(student, rows, rows=rows, keep_mask=mask)
    expected = losses.vocab_parallel_log_probs(student, rows, rows=rows.clone(), keep_mask=mask.clone())
    assert torch.equal(*(backward(x, student)[0] for x in (values, expected)))
    # An output layer that is frozen, and was loaded so.
    mine = random(T, H, seed=3).requires_grad_()
    log_probs = losses.vocab_parallel_log_probs(losses.deferred_logits(mine, weight), torch.arange(T))
    expected = losses.vocab_parallel_log_probs(linear(mine, weight.clone()), torch.arange(T))
    assert torch.allclose(*(backward(x, mine)[0] for x in (log_probs, expected)))


def test_the_gradient_may_overwrite_logits_that_are_materialized() -> None:
    leaf, teacher = random(T, V, seed=0).requires_grad_(), random(3, V, seed=1)
    rows = torch.tensor([1, 5, 7])
    (expected,) = backward(losses.full_vocabulary_divergence(leaf, teacher, rows=rows), leaf)
    logits = leaf * 1
    values = losses.full_vocabulary_divergence(logits, teacher, rows=rows, inplace_backward=True)
    (gradient,) = backward(values, leaf)
    assert torch.equal(gradient, expected)
    with pytest.raises(InvalidInputError, match="overwritten with their gradient"):
        losses.full_vocabulary_divergence(logits, teacher, rows=rows)
    logits = leaf * 1
    with pytest.raises(InvalidInputError, match="teacher 0 is in the memory of the student's logits"):
        losses.full_vocabulary_divergence(logits, logits.detach()[:3], rows=rows, inplace_backward=True)
    deferred = losses.deferred_logits(leaf, random(V, V, seed=2))
    losses.full_vocabulary_divergence(deferred, teacher, rows=rows, inplace_backward=True)
    assert "materialized" not in repr(deferred)
