"""Distillation losses from teachers of both kinds against whole rows in float64; for ranks see tests/real."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_patches import losses
from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import (
    DistillationBatch,
    DistillationOptions,
    FullDistribution,
    OutputHead,
    SequenceLayout,
    TopKDistribution,
    make_distillation_loss_func,
    mix_teachers,
    route_teachers,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)
from megatron_rl_patches.losses.vocab.divergences import DIVERGENCES
from tests.references.dense import buckets, dense_divergence, random
from tests.unit.losses.vocab.pairwise import pairwise

V, H, K, TEMPERATURE, LONGEST = 300, 6, 4, 0.7, 8
TOTALS, RESPONSES = [6, 4, 9], [3, 0, 8]
LAYOUT = SequenceLayout.build(TOTALS, RESPONSES)
ROWS = LAYOUT.response_rows
MASKS = [torch.tensor([1, 0, 1]), torch.zeros(0), torch.tensor([1, 1, 0, 0, 1, 1, 1, 0])]
MASK = torch.cat(MASKS) != 0

HEADS = {
    name: OutputHead(random(V, h, seed=h), random(V, seed=h + 1)) for name, h in (("math", 4), ("code", 5))
}
HIDDEN = {name: random(len(MASK), head.weight.shape[1], seed=9) for name, head in HEADS.items()}
#: Of the policy that sampled, which is not the student any more.
OLD = vocab_parallel_topk(random(len(MASK), V, seed=7), K, temperature=TEMPERATURE)


def teacher(kind: str, name: str) -> list[Any]:
    """A teacher's distributions of each response."""
    whole = FullDistribution.from_hidden(HIDDEN[name], HEADS[name])
    if kind == "full":
        return whole.split(RESPONSES)
    how = {"with_tail": True, "temperature": TEMPERATURE}
    with torch.no_grad():
        at_ids = vocab_parallel_log_probs_at(whole.logits()[0], OLD.indices, **how)
    return TopKDistribution(OLD.indices, *at_ids).split(RESPONSES)


def spoiled(
    distributions: Sequence[Any], masks: Sequence[Tensor], id_of_masked: int | None = None
) -> list[Any]:
    """NaN at masked tokens, and perhaps one id in place of all others."""

    def spoil(x: Tensor, mask: Tensor) -> Tensor:
        other = math.nan if x.is_floating_point() else id_of_masked
        return x if other is None else x.where((mask != 0).view(-1, *[1] * (x.dim() - 1)), other)

    pairs = zip(distributions, masks, strict=True)
    return [one.with_tensors([spoil(x, mask) for x in one.tensors]) for one, mask in pairs]


NOTHING = [torch.zeros_like(mask) for mask in MASKS]


def teachers(kind: str, combination: str) -> list[list[Any]]:
    math_, code = teacher(kind, "math"), teacher(kind, "code")
    routed = route_teachers(["math", "code", "code"], {"math": math_, "code": code})
    if combination == "averaged":
        return [math_, routed, spoiled(code, NOTHING)]
    mixed = [mix_teachers(pair, [0.2, 0.8]) for pair in zip(math_, code, strict=True)]
    return [{"one": math_, "routed": routed, "mixed": mixed}[combination]]


def dense_of_teacher(name: str) -> Tensor:
    """Log-probabilities ``[n, V]``, without anything of the package."""
    head = HEADS[name]
    return ((HIDDEN[name] @ head.weight.T + head.bias) / TEMPERATURE).log_softmax(1)


def dense_teachers(combination: str) -> list[tuple[float, Tensor]]:
    """Weights and log-probabilities ``[n, V]``."""
    math_, code = map(dense_of_teacher, ("math", "code"))
    routed = torch.cat([math_[: RESPONSES[0]], code[RESPONSES[0] :]])
    if combination == "averaged":
        return [(0.25, math_), (0.75, routed)]
    mixed = (0.2 * math_.exp() + 0.8 * code.exp()).log()
    return [(1.0, {"one": math_, "routed": routed, "mixed": mixed}[combination])]


def formula(divergence: str, log_p: Tensor, log_q: Tensor, log_old: Tensor) -> Tensor:
    """Return that of buckets or whole rows; the tail is what ``generalized_kl`` leaves out."""
    if divergence == "generalized_kl":
        return (log_p.exp() * (log_p - log_q) - log_p.exp() + log_q.exp())[:, :-1].sum(1)
    return dense_divergence(divergence, log_p, log_q, log_old, 0.3)


def student() -> tuple[Tensor, Tensor]:
    return random(sum(TOTALS), H, seed=1).requires_grad_(), random(V, H, seed=2).requires_grad_()


def mean(values: Tensor, normalization: str) -> Tensor:
    responses = zip(values.split(RESPONSES), MASKS, strict=True)
    kept = [value[mask != 0] for value, mask in responses if mask.any()]
    if normalization == "token":
        return torch.cat(kept).mean()
    if normalization == "sequence":
        return torch.stack([value.mean() for value in kept]).mean()
    return torch.stack([value.sum() / LONGEST for value in kept]).mean()


CASES: dict[str, Sequence[Any]] = {
    "kind": ["top-k", "full"],
    "divergence": list(DIVERGENCES),
    "combination": ["one", "routed", "mixed", "averaged"],
    "normalization": ["token", "sequence", "constant"],
    "is_deferred": [False, True],
    "inplace_backward": [False, True],
    "recompute": [False, True],
    "normalizer": [None, 1.5],
}


@pytest.mark.parametrize("case", pairwise(CASES), ids=lambda case: f"{case['kind']}, {case['combination']}")
def test_loss_gradients_and_metrics_are_the_dense_ones(case: dict[str, Any]) -> None:
    kind, combination, normalization = case["kind"], case["combination"], case["normalization"]
    divergence = case["divergence"]
    if kind == "full" and divergence == "generalized_kl":  # which is over k ids
        divergence = "reverse_kl"
    hidden, weight = student()
    batch = DistillationBatch(teachers(kind, combination), MASKS, teacher(kind, "code"))
    options = DistillationOptions(
        divergence,
        beta=0.3,
        normalization=normalization,
        constant_length=LONGEST,
        teacher_weights=(1.0, 3.0, 0.0) if combination == "averaged" else None,
    )
    of_call = {name: case[name] for name in ("inplace_backward", "recompute", "normalizer")}
    loss_func = make_distillation_loss_func(LAYOUT, batch, options, temperature=TEMPERATURE, **of_call)
    deferred = losses.deferred_logits(hidden, weight, tile_bytes=4096)
    loss, count, metrics = loss_func((deferred if case["is_deferred"] else hidden @ weight.T)[None])

    log_p, total, tail = (hidden @ weight.T / TEMPERATURE).log_softmax(1)[ROWS], 0.0, 0.0
    of_kind = buckets if kind == "top-k" else lambda log_p, ids: log_p
    log_old = of_kind(dense_of_teacher("code"), OLD.indices)
    for share, log_q in dense_teachers(combination):
        p, q = (of_kind(one, OLD.indices) for one in (log_p, log_q))
        total = total + share * formula(divergence, p, q, log_old)
        tail = tail + share * q[:, -1].exp()
    expected = mean(total, normalization)
    divisor = metrics["loss"][1] / (case["normalizer"] or 1.0)
    torch.testing.assert_close(loss / divisor, expected, rtol=1e-10, atol=0)
    of_loss, of_expected = (torch.autograd.grad(one, (hidden, weight)) for one in (loss / divisor, expected))
    torch.testing.assert_close(of_loss, of_expected, rtol=1e-9, atol=1e-12)
    assert count.dtype == torch.int32
    assert count == (metrics["loss"][1] if case["normalizer"] is None else 1)
    averages = {"loss": expected.item(), "divergence": mean(total, "token").item()}
    if kind == "top-k":
        averages |= {
            "student_tail": mean(buckets(log_p, OLD.indices)[:, -1].exp(), "token").item(),
            "teacher_tail": mean(tail, "token").item(),
        }
    assert losses.average_metrics([metrics]) == pytest.approx(averages)
    if kind == "top-k" and case["normalizer"] is None:
        found = losses.distillation_loss(*student_at_ids(hidden @ weight.T), batch, options)
        torch.testing.assert_close(found, (loss, count, metrics), rtol=1e-10, atol=1e-12)


def student_at_ids(logits: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    topk = vocab_parallel_log_probs_at(logits[ROWS], OLD.indices, temperature=TEMPERATURE, with_tail=True)
    return tuple(list(values.split(RESPONSES)) for values in topk)


@pytest.mark.parametrize("divergence", [name for name in DIVERGENCES if hasattr(losses, name)])
def test_functions_of_ids_and_tail(divergence: str) -> None:
    logits = random(sum(TOTALS), V, seed=1)
    others = [TopKDistribution.cat(teacher("top-k", name)) for name in ("math", "code")]
    others = others if divergence.startswith("importance") else others[:1]
    beta = {"beta": 0.3} if divergence == "jensen_shannon" else {}
    found = getattr(losses, divergence)(*map(torch.cat, student_at_ids(logits)), *others, **beta)
    log_p = (logits / TEMPERATURE).log_softmax(1)[ROWS]
    of_each = (buckets(one, OLD.indices) for one in (log_p, *map(dense_of_teacher, ("math", "code"))))
    torch.testing.assert_close(found, formula(divergence, *of_each), rtol=1e-10, atol=1e-12)


OF_FULL = ("reverse_kl", "forward_kl", "importance_weighted_reverse_kl")


@pytest.mark.parametrize(
    ("kind", "divergence"),
    [*(("top-k", name) for name in DIVERGENCES), *(("full", name) for name in OF_FULL)],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_masked_tokens_may_be_anything_and_are_not_computed(
    kind: str, divergence: Any, inplace: bool
) -> None:
    """The student's logits, and distributions of the teacher and of the old policy."""
    options, results = DistillationOptions(divergence), []
    for of_masked in (0.0, math.nan, math.inf, -math.inf):
        kept = MASKS if of_masked else [torch.ones_like(mask) for mask in MASKS]
        of_teacher, old = (spoiled(teacher(kind, name), kept, 0) for name in ("math", "code"))
        batch = DistillationBatch([of_teacher], MASKS, old)
        leaf = random(sum(TOTALS), V, seed=1).index_fill_(0, ROWS[~MASK], of_masked).requires_grad_()
        loss_func = make_distillation_loss_func(LAYOUT, batch, options, inplace_backward=inplace)
        loss, _, metrics = loss_func(leaf[None] * 1)
        results.append((loss, *torch.autograd.grad(loss, leaf), *metrics.values()))
        assert all(map(torch.equal, results[0], results[-1]))
    assert not results[0][1][ROWS[~MASK]].any()


@pytest.mark.parametrize("kind", ["top-k", "full"])
def test_a_microbatch_wholly_masked_reaches_every_parameter(kind: str) -> None:
    leaves, batch = student(), DistillationBatch(teachers(kind, "routed"), NOTHING)
    loss, count, _ = make_distillation_loss_func(LAYOUT, batch)(losses.deferred_logits(*leaves)[None])
    assert loss == 0 and count == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, leaves))


# --- full distributions


def test_a_teacher_whose_vocabulary_is_padded_to_another_size() -> None:
    hidden, weight = student()
    longer = torch.cat([HEADS["math"].weight, random(20, 4, seed=8)])
    padded = OutputHead(longer, torch.zeros(V + 20, dtype=torch.float64))
    exact = OutputHead(HEADS["math"].weight[: V - 10])
    found = []
    for head, ids, rows in ((padded, V - 10, V), (exact, None, V - 10)):
        whole = FullDistribution.from_hidden(HIDDEN["math"], head)
        batch = DistillationBatch([whole.split(RESPONSES)], MASKS)
        func = make_distillation_loss_func(LAYOUT, batch, vocab_size=ids)
        found.append(func(losses.deferred_logits(hidden, weight[:rows])[None])[0])
    assert torch.allclose(*found, rtol=1e-10)


# --- mixtures of teachers, and each sample's own teacher


def test_a_mixture_of_small_probabilities_keeps_them() -> None:
    """Where the probabilities themselves are zero in float32."""
    nothing = torch.tensor([-math.inf])
    low, lower = torch.tensor([[[0.0, -200.0]], [[0.0, -210.0]]])
    found = mix_teachers([TopKDistribution(torch.tensor([[3, 4]]), x, nothing) for x in (low, lower)])
    assert found.log_probs[0].tolist() == pytest.approx([0.0, -200.0 - 0.6931 + 4.54e-5], abs=1e-4)
    assert found.tail_log_prob.tolist() == [-math.inf]
    assert found.nbytes == 2 * 8 + 3 * 4


def test_a_teacher_of_weight_zero_is_not_heard() -> None:
    other = TOP_K[0]
    of_nan = other.with_tensors([other.indices, other.log_probs * math.nan, other.tail_log_prob * math.nan])
    found = mix_teachers([of_nan, other], [0.0, 3.0])
    torch.testing.assert_close(found.tensors, other.tensors)


def test_each_sample_gets_what_its_teacher_has() -> None:
    names = ["code", "math", "code"]
    assert route_teachers(names, {"math": [1, 2, 3], "code": ["a", "b", "c"]}) == ["a", 2, "c"]
    assert route_teachers(names, {"math": {1: 2}, "code": ["a", None, "c"], "unused": []}) == ["a", 2, "c"]
    assert route_teachers([], {}) == []
    for values, message in (
        (
            {"math": [1, 2, 3], "code": [None, 5, 6]},
            "sample 0 names .* 'code', which has nothing for it: score the sample",
        ),
        ({"math": [1, 2, 3], "code": [4, 5]}, "sample 2 names the teacher 'code'"),
        ({"math": {}, "code": [4, 5, 6]}, "sample 1 names the teacher 'math'"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            route_teachers(names, values)


# --- refusals

TOP_K, FULL = teacher("top-k", "math"), teacher("full", "math")
ROUTED = teachers("full", "routed")[0]
TWICE = replace(OLD, indices=OLD.indices[:, [0, 1, 2, 0]], temperature=None).split(RESPONSES)
HOTTER, UNKNOWN = (replace(OLD, temperature=number) for number in (1.0, None))
COLD, HOT = OLD.split(RESPONSES), HOTTER.split(RESPONSES)
OTHER_IDS = [vocab_parallel_topk(random(n, V, seed=n), K) for n in RESPONSES]
HEAD = HEADS["math"]
NO_MASKS = [torch.zeros(n) for n in RESPONSES]
NARROW = [FullDistribution.from_hidden(*one.hidden, OutputHead(HEAD.weight[1:])) for one in FULL]


def batch(*teachers: Any, old: Any = None) -> DistillationBatch:
    return DistillationBatch(list(teachers), MASKS, old)


def loss_func(batch: DistillationBatch, layout: SequenceLayout = LAYOUT, **options: Any) -> Any:
    return make_distillation_loss_func(layout, batch, DistillationOptions(**options))


TEMPERATURES = "differ in temperature, "
SIZES = rf"differ in vocab_size, {V} and .*: pass the same to the loss"
LOGITS = torch.zeros(1, sum(TOTALS), V)
REFUSED: list[tuple[Callable[[], Any], str]] = [
    # A loss is of the temperature 1.
    (lambda: loss_func(batch(COLD)), TEMPERATURES),
    (lambda: loss_func(batch(TOP_K, old=COLD)), TEMPERATURES),
    (lambda: batch(COLD, HOT), TEMPERATURES),
    (lambda: batch(COLD, old=HOT), TEMPERATURES),
    (lambda: losses.importance_weighted_reverse_kl(*OLD.tensors[1:], OLD, HOTTER), TEMPERATURES),
    (lambda: TopKDistribution.cat([OLD, HOTTER]), TEMPERATURES),
    (lambda: batch(FULL, TOP_K), "FullDistribution and TopKDistribution; pass one kind"),
    (lambda: mix_teachers([OLD, OLD], [0.0, 0.0]), "weights are"),
    (lambda: batch(FULL[::-1]), "distributions of teacher 0"),
    (lambda: batch(TOP_K, old=TOP_K[::-1]), "of old have the shapes"),
    (lambda: batch(TOP_K, OTHER_IDS), "different indices"),
    (lambda: batch(TOP_K, old=OTHER_IDS), "different indices"),
    (lambda: loss_func(batch(TWICE)), "at most once per token"),
    (lambda: loss_func(batch([mix_teachers([one, one]) for one in TWICE])), "at most once per token"),
    (lambda: loss_func(batch(TOP_K), teacher_weights=(1.0, 2.0)), "for 1 teacher"),
    (lambda: loss_func(batch(TOP_K), SequenceLayout.build(TOTALS, [3, 1, 8])), "pass the full responses"),
    # A loss over all V columns, and teachers over others.
    (lambda: loss_func(batch([replace(one, vocab_size=V - 1) for one in TOP_K]))(LOGITS), SIZES),
    (lambda: batch(TOP_K, [replace(one, vocab_size=n) for n, one in enumerate(TOP_K, V)]), SIZES),
    # Ranks with tokens refuse the second teacher, so that one without any must refuse it, too.
    (
        lambda: make_distillation_loss_func(LAYOUT, DistillationBatch([FULL, NARROW], NO_MASKS))(LOGITS),
        rf"teacher 0 is \[0, {V - 1}\] on cpu, expected 0 rows",
    ),
    (lambda: mix_teachers([replace(OLD, vocab_size=n) for n in (V, V + 1)]), SIZES),
    (
        lambda: FullDistribution((random(3, 4, seed=0), random(2, 4, seed=0)), (HEAD, HEAD), (1.0, 1.0)),
        r"hidden states are \[2, 4\], expected \[3, h\]",
    ),
    (lambda: FullDistribution.cat(ROUTED), "of different teachers"),
    (lambda: HEAD.resharded(0, None), "width is 0, expected the rows"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_does_not_fit_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make()


@pytest.mark.parametrize("join", [TopKDistribution.cat, mix_teachers])
def test_the_temperature_is_known_where_all_know_theirs(join: Callable[[list[Any]], Any]) -> None:
    assert join([OLD, OLD]).temperature == TEMPERATURE
    for unknown in ([OLD, UNKNOWN], [UNKNOWN, OLD], [UNKNOWN, UNKNOWN]):
        assert join(unknown).temperature is None
