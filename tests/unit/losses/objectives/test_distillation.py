"""Distillation losses from teachers of both kinds against whole rows in float64; for ranks see tests/real."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import (
    DistillationBatch,
    DistillationOptions,
    FullDistribution,
    OutputHead,
    SequenceLayout,
    TopKDistribution,
    average_metrics,
    deferred_logits,
    distillation_loss,
    forward_kl,
    full_vocabulary_divergence,
    generalized_kl,
    importance_weighted_reverse_kl,
    jensen_shannon,
    make_distillation_loss_func,
    mix_teachers,
    reverse_kl,
    route_teachers,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)
from megatron_rl_patches.losses.logits.divergences import DIVERGENCES
from tests.unit.losses.logits.pairwise import pairwise

V, H, K, TEMPERATURE, LONGEST = 300, 6, 4, 0.7, 8
TOTALS, RESPONSES = [6, 4, 9], [3, 0, 8]
LAYOUT = SequenceLayout.build(TOTALS, RESPONSES)
ROWS = LAYOUT.response_rows
MASKS = [torch.tensor([1, 0, 1]), torch.zeros(0), torch.tensor([1, 1, 0, 0, 1, 1, 1, 0])]
MASK = torch.cat(MASKS) != 0
of_each_kind = pytest.mark.parametrize("kind", ["top-k", "full"])


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
    return scored(whole.logits()[0]).split(RESPONSES)


def scored(logits: Tensor) -> TopKDistribution:
    """At the ids of the policy that sampled."""
    with torch.no_grad():
        at_ids = vocab_parallel_log_probs_at(logits, OLD.indices, with_tail=True, temperature=TEMPERATURE)
    return TopKDistribution(OLD.indices, *at_ids)


def spoiled(distributions: Sequence[Any], masks: Sequence[Tensor]) -> list[Any]:
    """NaN at masked tokens."""

    def with_nan(x: Tensor, mask: Tensor) -> Tensor:
        return x.where((mask != 0).view(-1, *[1] * (x.dim() - 1)), math.nan) if x.is_floating_point() else x

    pairs = zip(distributions, masks, strict=True)
    return [one.with_tensors([with_nan(x, mask) for x in one.tensors]) for one, mask in pairs]


NOTHING = [torch.zeros_like(mask) for mask in MASKS]


def teachers(kind: str, combination: str) -> list[list[Any]]:
    math_, code = teacher(kind, "math"), teacher(kind, "code")
    routed = route_teachers(["math", "code", "code"], {"math": math_, "code": code})
    if combination == "averaged":
        return [math_, routed, spoiled(code, NOTHING)]
    mixed = [mix_teachers(pair, [0.2, 0.8]) for pair in zip(math_, code, strict=True)]
    return [{"one": math_, "routed": routed, "mixed": mixed}[combination]]


WEIGHTS = {"averaged": (1.0, 3.0, 0.0)}


def dense_teachers(combination: str) -> list[tuple[float, Tensor]]:
    """Weights and log-probabilities ``[n, V]``, without anything of the package."""
    math_, code = (
        ((HIDDEN[name] @ head.weight.T + head.bias) / TEMPERATURE).log_softmax(1)
        for name, head in HEADS.items()
    )
    routed = torch.cat([math_[: RESPONSES[0]], code[RESPONSES[0] :]])
    if combination == "averaged":
        return [(0.25, math_), (0.75, routed)]
    mixed = (0.2 * math_.exp() + 0.8 * code.exp()).log()
    return [(1.0, {"one": math_, "routed": routed, "mixed": mixed}[combination])]


def buckets(log_p: Tensor) -> Tensor:
    """Log-probabilities of the ids, and of all others together."""
    log_p_nk = log_p.gather(1, OLD.indices)
    return torch.cat([log_p_nk, (1 - log_p_nk.exp().sum(1, keepdim=True)).log()], 1)


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
    hidden, weight = student()
    loss_func = make_distillation_loss_func(
        LAYOUT,
        DistillationBatch(teachers(kind, combination), MASKS),
        DistillationOptions(
            normalization=normalization, constant_length=LONGEST, teacher_weights=WEIGHTS.get(combination)
        ),
        temperature=TEMPERATURE,
        **{name: case[name] for name in ("inplace_backward", "recompute", "normalizer")},
    )
    deferred = deferred_logits(hidden, weight, tile_bytes=4096)
    loss, count, metrics = loss_func((deferred if case["is_deferred"] else hidden @ weight.T)[None])

    log_p, total, tail = (hidden @ weight.T / TEMPERATURE).log_softmax(1)[ROWS], 0.0, 0.0
    for share, log_q in dense_teachers(combination):
        p, q = (buckets(log_p), buckets(log_q)) if kind == "top-k" else (log_p, log_q)
        total = total + share * (p.exp() * (p - q)).sum(1)
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
            "student_tail": mean(buckets(log_p)[:, -1].exp(), "token").item(),
            "teacher_tail": mean(tail, "token").item(),
        }
    assert average_metrics([metrics]) == pytest.approx(averages)


OF_BUCKETS: dict[str, Callable[..., Tensor]] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "jensen_shannon": partial(jensen_shannon, beta=0.3),
    "generalized_kl": generalized_kl,
    "importance_weighted_reverse_kl": importance_weighted_reverse_kl,
}


def student_at_ids(logits: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    topk = vocab_parallel_log_probs_at(logits[ROWS], OLD.indices, temperature=TEMPERATURE, with_tail=True)
    return tuple(list(values.split(RESPONSES)) for values in topk)


@pytest.mark.parametrize("divergence", OF_BUCKETS)
def test_losses_of_a_top_k_are_those_of_the_divergence(divergence: Any) -> None:
    logits = random(sum(TOTALS), V, seed=1)
    options = DistillationOptions(divergence, beta=0.3)
    batch = DistillationBatch([teacher("top-k", "math")], MASKS, OLD.split(RESPONSES))
    of_closure = make_distillation_loss_func(LAYOUT, batch, options, temperature=TEMPERATURE)(logits[None])
    of_log_probs = distillation_loss(*student_at_ids(logits), batch, options)
    old = [OLD] if divergence.startswith("importance") else []
    at_ids = map(torch.cat, student_at_ids(logits))
    expected = OF_BUCKETS[divergence](*at_ids, TopKDistribution.cat(batch.teachers[0]), *old)
    for loss, count, metrics in (of_closure, of_log_probs):
        assert torch.allclose(loss, expected[MASK].sum())
        assert count == MASK.sum()
        assert all(torch.allclose(metrics[name], of_log_probs[2][name]) for name in metrics)


@pytest.mark.parametrize(
    "divergence", ["reverse_kl", "importance_weighted_reverse_kl", "jensen_shannon", "forward_kl"]
)
def test_losses_of_full_distributions_are_those_of_the_divergence(divergence: Any) -> None:
    logits, old = random(sum(TOTALS), V, seed=1), teacher("full", "code")
    options = DistillationOptions(divergence, beta=0.3)
    batch = DistillationBatch([teacher("full", "math")], MASKS, old)
    loss, _, _ = make_distillation_loss_func(LAYOUT, batch, options, temperature=TEMPERATURE)(logits[None])
    of_teacher, of_old = (FullDistribution.cat(one).logits()[0] for one in (teacher("full", "math"), old))
    names = {"divergence": divergence, "beta": 0.3, "old": of_old, "temperature": TEMPERATURE}
    expected = full_vocabulary_divergence(logits, of_teacher, rows=ROWS, **names)
    assert torch.allclose(loss, expected[MASK].sum(), rtol=1e-10)


def test_microbatches_of_one_token_and_of_three() -> None:
    """Their mean is over tokens, 2.5, and not 2.0 over microbatches (modelscope/ms-swift#10076)."""
    steps = []
    for divergence, tokens in ((1.0, 1), (3.0, 3)):
        log_prob = torch.full((tokens, 1), -divergence)  # of the id of which the teacher is certain
        certain = TopKDistribution(
            torch.zeros_like(log_prob).long(), 0 * log_prob, torch.full((tokens,), -torch.inf)
        )
        batch = DistillationBatch([[certain]], [torch.ones(tokens)])
        tail = torch.log1p(-log_prob[:, 0].exp())
        steps.append(distillation_loss([log_prob], [tail], batch, DistillationOptions("forward_kl")))
    losses, counts, metrics = zip(*steps, strict=True)
    assert sum(losses) / sum(counts) == pytest.approx(2.5)
    assert average_metrics(metrics)["loss"] == pytest.approx(2.5)


@of_each_kind
@pytest.mark.parametrize("divergence", ["reverse_kl", "importance_weighted_reverse_kl"])
def test_masked_tokens_may_be_anything_and_are_not_computed(kind: str, divergence: Any) -> None:
    hidden, weight = student()
    results = []
    for masks in ([torch.ones_like(mask) for mask in MASKS], MASKS):
        of_teacher, old = (spoiled(teacher(kind, name), masks) for name in ("math", "code"))
        batch = DistillationBatch([of_teacher], MASKS, old)
        loss_func = make_distillation_loss_func(LAYOUT, batch, DistillationOptions(divergence))
        loss, _, metrics = loss_func(deferred_logits(hidden, weight)[None])
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight)), *metrics.values()))
    assert all(map(torch.equal, *results))
    assert not results[0][1][ROWS[~MASK]].any()


@pytest.mark.parametrize(
    ("kind", "divergence"),
    [*(("top-k", name) for name in DIVERGENCES), *(("full", name) for name in ("reverse_kl", "forward_kl"))],
)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_students_logits_of_masked_tokens_may_be_anything(
    kind: str, divergence: Any, inplace: bool, value: float
) -> None:
    batch = DistillationBatch([teacher(kind, "math")], MASKS, teacher(kind, "code"))
    options, results = DistillationOptions(divergence), []
    for of_masked in (0.0, value):
        leaf = random(sum(TOTALS), V, seed=1).index_fill_(0, ROWS[~MASK], of_masked).requires_grad_()
        loss_func = make_distillation_loss_func(LAYOUT, batch, options, inplace_backward=inplace)
        loss, _, metrics = loss_func(leaf[None] * 1)
        results.append((loss, *torch.autograd.grad(loss, leaf), *metrics.values()))
    assert all(map(torch.equal, *results))
    assert not results[1][1][ROWS[~MASK]].any()


@of_each_kind
def test_a_microbatch_wholly_masked_reaches_every_parameter(kind: str) -> None:
    hidden, weight = student()
    batch = DistillationBatch(teachers(kind, "routed"), NOTHING)
    loss, count, _ = make_distillation_loss_func(LAYOUT, batch)(deferred_logits(hidden, weight)[None])
    assert loss == 0 and count == 0
    gradients = torch.autograd.grad(loss, (hidden, weight))
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


# --- full distributions


def test_a_teacher_whose_vocabulary_is_padded_to_another_size() -> None:
    hidden, weight = student()
    padded = OutputHead(
        torch.cat([HEADS["math"].weight, random(20, 4, seed=8)]), torch.zeros(V + 20, dtype=torch.float64)
    )
    exact = OutputHead(HEADS["math"].weight[: V - 10])
    losses = []
    for head, ids, rows in ((padded, V - 10, V), (exact, None, V - 10)):
        batch = DistillationBatch(
            [FullDistribution.from_hidden(HIDDEN["math"], head).split(RESPONSES)], MASKS
        )
        func = make_distillation_loss_func(LAYOUT, batch, DistillationOptions(num_ids=ids))
        losses.append(func(deferred_logits(hidden, weight[:rows])[None])[0])
    assert torch.allclose(*losses, rtol=1e-10)


@pytest.mark.parametrize("combination", ["routed", "mixed"])
def test_the_device_gets_the_hidden_states_of_tokens_that_count(
    combination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of h numbers for each of these tokens and each teacher that it is compared with."""
    moved = 0
    to = FullDistribution.to

    def noting(self: FullDistribution, *args: Any, **kwargs: Any) -> FullDistribution:
        nonlocal moved
        moved += self.nbytes
        return to(self, *args, **kwargs)

    monkeypatch.setattr(FullDistribution, "to", noting)
    batch = DistillationBatch(teachers("full", combination), MASKS)
    make_distillation_loss_func(LAYOUT, batch)(deferred_logits(*student())[None])
    of_math, of_code = (8 * head.weight.shape[1] for head in HEADS.values())
    both = of_math + of_code
    of_sample = [of_math, of_code, of_code] if combination == "routed" else [both, both, both]
    assert moved == sum(int(mask.sum()) * size for mask, size in zip(MASKS, of_sample, strict=True))


# --- refusals

TOP_K, FULL = teacher("top-k", "math"), teacher("full", "math")
ROUTED, MIXED = teachers("full", "routed")[0], teachers("full", "mixed")[0]
TWICE = replace(OLD, indices=OLD.indices[:, [0, 1, 2, 0]], temperature=None).split(RESPONSES)
HOTTER, UNKNOWN = (replace(OLD, temperature=number) for number in (1.0, None))
OTHER_IDS = [vocab_parallel_topk(random(n, V, seed=n), K) for n in RESPONSES]
HEAD = HEADS["math"]


def loss_func(batch: DistillationBatch, layout: SequenceLayout = LAYOUT, **options: Any) -> Any:
    return make_distillation_loss_func(layout, batch, DistillationOptions(**options))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no teachers": (lambda: DistillationBatch([], MASKS), "expected a list of at least one"),
    "no responses": (lambda: DistillationBatch([TOP_K], []), "loss_masks have the shapes"),
    "no distributions": (lambda: DistillationBatch([[]], MASKS), "old are missing"),
    "another stage": (lambda: DistillationBatch([None], MASKS), "off the last pipeline stage"),
    "a missing teacher": (lambda: DistillationBatch([[None] * 3], MASKS), "NoneType; pass one kind"),
    "kinds": (
        lambda: DistillationBatch([FULL, TOP_K], MASKS),
        "FullDistribution and TopKDistribution; pass one kind",
    ),
    "a mixture of kinds": (lambda: mix_teachers([FULL[0], TOP_K[0]]), "and TopKDistribution; pass one kind"),
    "fewer responses": (lambda: DistillationBatch([TOP_K[:2]], MASKS), "teacher 0 have the shapes"),
    "lengths": (lambda: DistillationBatch([FULL[::-1]], MASKS), "distributions of teacher 0"),
    "lengths of old": (lambda: DistillationBatch([TOP_K], MASKS, TOP_K[::-1]), "of old have the shapes"),
    "ids": (lambda: DistillationBatch([TOP_K, OTHER_IDS], MASKS), "different indices"),
    "ids of old": (lambda: DistillationBatch([TOP_K], MASKS, OTHER_IDS), "different indices"),
    "an id twice": (lambda: loss_func(DistillationBatch([TWICE], MASKS)), "at most once per token"),
    "another temperature": (
        lambda: loss_func(DistillationBatch([OLD.split(RESPONSES)], MASKS)),
        r"and loss are of the temperatures \[1.0, 0.7\]",
    ),
    "another temperature of old": (
        lambda: loss_func(DistillationBatch([TOP_K], MASKS, OLD.split(RESPONSES))),
        r"and loss are of the temperatures \[1.0, 0.7\]",
    ),
    "temperatures of teachers": (
        lambda: DistillationBatch([OLD.split(RESPONSES), HOTTER.split(RESPONSES)], MASKS),
        r"distributions are of the temperatures \[0.7, 1.0\]",
    ),
    "temperatures of teacher and old": (
        lambda: DistillationBatch([OLD.split(RESPONSES)], MASKS, HOTTER.split(RESPONSES)),
        r"distributions are of the temperatures \[0.7, 1.0\]",
    ),
    "temperatures of a divergence": (
        lambda: importance_weighted_reverse_kl(OLD.log_probs, OLD.tail_log_prob, OLD, HOTTER),
        r"distributions are of the temperatures \[0.7, 1.0\]",
    ),
    "temperatures of a mixture": (
        lambda: mix_teachers([OLD, HOTTER]),
        r"distributions are of the temperatures \[0.7, 1.0\]",
    ),
    "temperatures of a cat": (
        lambda: TopKDistribution.cat([OLD, HOTTER]),
        r"distributions are of the temperatures \[0.7, 1.0\]",
    ),
    "an id twice in a mixture": (
        lambda: loss_func(DistillationBatch([[mix_teachers([one, one]) for one in TWICE]], MASKS)),
        "at most once per token",
    ),
    "old is a mixture": (lambda: DistillationBatch([ROUTED], MASKS, MIXED), "old is a mixture"),
    "no old": (
        lambda: loss_func(DistillationBatch([TOP_K], MASKS), divergence="importance_weighted_reverse_kl"),
        "old is needed",
    ),
    "weights": (
        lambda: loss_func(DistillationBatch([TOP_K, TOP_K], MASKS), teacher_weights=(1.0,)),
        "for 2 teacher",
    ),
    "generalized": (
        lambda: loss_func(DistillationBatch([FULL], MASKS), divergence="generalized_kl"),
        "which is over k ids",
    ),
    "num_ids": (
        lambda: loss_func(DistillationBatch([TOP_K], MASKS), num_ids=V),
        "num_ids is for full distributions",
    ),
    "layout": (
        lambda: loss_func(DistillationBatch([TOP_K], MASKS), SequenceLayout.build(TOTALS, [3, 1, 8])),
        "pass the full responses",
    ),
    "logits": (
        lambda: loss_func(DistillationBatch([TOP_K], MASKS))(torch.zeros(1, sum(TOTALS) - 1, V)),
        "logits are",
    ),
    "loss of full distributions": (
        lambda: distillation_loss([], [], DistillationBatch([FULL], MASKS), DistillationOptions()),
        "use make_distillation_loss_func",
    ),
    "rows": (
        lambda: FullDistribution((random(3, 4, seed=0), random(2, 4, seed=0)), (HEAD, HEAD), (1.0, 1.0)),
        r"hidden states are \[2, 4\], expected \[3, h\]",
    ),
    "hidden size": (
        lambda: FullDistribution.from_hidden(random(3, 7, seed=0), HEAD),
        r"\[3, 7\], expected \[3, h\]",
    ),
    "numbers": (lambda: FullDistribution((), (), ()), "0 hidden states, 0 heads and 0 weights"),
    "cat": (lambda: FullDistribution.cat(ROUTED), "of different teachers"),
    "width": (lambda: HEAD.resharded(0, None), "width is 0, expected the rows"),
    "divergence": (lambda: DistillationOptions("kl"), "must be one of"),
    "beta": (lambda: DistillationOptions("jensen_shannon", beta=1.0), "beta is 1.0"),
    "negative weight": (lambda: DistillationOptions(teacher_weights=(1.0, -1.0)), "weights are"),
    "normalization": (lambda: DistillationOptions(normalization="mean"), "normalization"),
    "constant": (lambda: DistillationOptions(normalization="constant"), "constant_length"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(InvalidInputError, match=message):
        make()


@pytest.mark.parametrize("join", [TopKDistribution.cat, mix_teachers])
def test_the_temperature_is_known_where_all_know_theirs(join: Callable[[list[Any]], Any]) -> None:
    assert join([OLD, OLD]).temperature == TEMPERATURE
    for unknown in ([OLD, UNKNOWN], [UNKNOWN, OLD], [UNKNOWN, UNKNOWN]):
        assert join(unknown).temperature is None


def test_log_probs_of_other_responses_are_refused() -> None:
    batch = DistillationBatch([TOP_K], MASKS)
    log_probs, tails = student_at_ids(random(sum(TOTALS), V, seed=1))
    for of_student in ((log_probs[:2], tails), (log_probs, tails[::-1])):
        with pytest.raises(InvalidInputError, match="have the shapes"):
            distillation_loss(*of_student, batch, DistillationOptions())


def test_the_order_of_ids_does_not_matter_nor_what_masked_tokens_have() -> None:
    def loss(topk: TopKDistribution) -> Tensor:
        logits = random(1, sum(TOTALS), V, seed=1)
        batch = DistillationBatch([topk.split(RESPONSES)], MASKS)
        return make_distillation_loss_func(LAYOUT, batch, temperature=TEMPERATURE)(logits)[0]

    reordered = replace(OLD, indices=OLD.indices.flip(1), log_probs=OLD.log_probs.flip(1))
    masked = replace(OLD, indices=OLD.indices.where(MASK[:, None], 0))
    torch.testing.assert_close(loss(reordered), loss(OLD), rtol=1e-12, atol=0)
    assert torch.equal(loss(masked), loss(OLD))
