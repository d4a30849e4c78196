"""Distillation from hidden states: routed, mixed and averaged teachers, against whole rows in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    deferred_logits,
    distillation_loss,
    make_distillation_loss_func,
    mix_teachers,
    route_teachers,
    vocab_parallel_topk,
)

V, H, TEMPERATURE = 300, 6, 0.7
TOTALS, RESPONSES = [6, 4, 9], [3, 0, 8]
LAYOUT = SequenceLayout.build(TOTALS, RESPONSES)
MASKS = [torch.tensor([1, 0, 1]), torch.zeros(0), torch.tensor([1, 1, 0, 0, 1, 1, 1, 0])]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


HEADS = {
    name: OutputHead(random(V, h, seed=h), random(V, seed=h + 1)) for name, h in (("math", 4), ("code", 5))
}


def teacher(name: str) -> list[FullDistribution]:
    head = HEADS[name]
    hidden = random(sum(RESPONSES), head.weight.shape[1], seed=9)
    return FullDistribution.of(hidden, head).split(RESPONSES)


def log_probs(distributions: Sequence[FullDistribution]) -> Tensor:
    rows = []
    for one in distributions:
        parts = [
            ((hidden @ head.weight.T + head.bias) / TEMPERATURE).log_softmax(1)
            + math.log(weight / sum(one.weights))
            for hidden, head, weight in zip(one.hidden, one.heads, one.weights, strict=True)
        ]
        rows.append(torch.stack(parts).logsumexp(0))
    return torch.cat(rows)


def student() -> tuple[Tensor, Tensor]:
    return random(sum(TOTALS), H, seed=1).requires_grad_(), random(V, H, seed=2).requires_grad_()


ROUTED = route_teachers(["math", "code", "code"], {name: teacher(name) for name in HEADS})
MIXED = [mix_teachers(pair, [0.2, 0.8]) for pair in zip(teacher("math"), teacher("code"), strict=True)]
TEACHERS = {
    "one": [teacher("math")],
    "routed": [ROUTED],
    "mixed": [MIXED],
    "averaged": [teacher("math"), ROUTED],
}


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("name", TEACHERS)
def test_loss_and_gradients_are_the_dense_ones(name: str, made: bool) -> None:
    hidden, weight = student()
    options = DistillationOptions(teacher_weights=(1.0, 3.0) if name == "averaged" else None)
    batch = DistillationBatch(TEACHERS[name], MASKS)
    loss_func = make_distillation_loss_func(
        LAYOUT, batch, options, temperature=TEMPERATURE, inplace_backward=True
    )
    logits = hidden @ weight.T if made else deferred_logits(hidden, weight, tile_bytes=4096)
    loss, count, metrics = loss_func(logits[None])

    log_p = (hidden @ weight.T / TEMPERATURE).log_softmax(1)[LAYOUT.response_rows]
    mask = torch.cat(MASKS)
    expected = torch.zeros((), dtype=torch.float64)
    for share, distributions in zip(options.teacher_weights or (1.0,), TEACHERS[name], strict=True):
        divergence = (log_p.exp() * (log_p - log_probs(distributions))).sum(1)
        expected = expected + (share / sum(options.teacher_weights or (1.0,))) * (divergence * mask).sum()
    assert torch.allclose(loss, expected, rtol=1e-10)
    assert count == mask.sum()
    assert set(metrics) == {"loss", "divergence"}
    of_loss, of_expected = (torch.autograd.grad(one, (hidden, weight)) for one in (loss, expected))
    for mine, reference in zip(of_loss, of_expected, strict=True):
        assert torch.allclose(mine, reference, rtol=1e-9, atol=1e-12)


def test_old_policy_and_jensen_shannon() -> None:
    hidden, weight = student()
    head = OutputHead(weight.detach())
    old = FullDistribution.of(hidden.detach()[LAYOUT.response_rows], head).split(RESPONSES)
    losses = {}
    for divergence in ("reverse_kl", "importance_weighted_reverse_kl", "jensen_shannon", "forward_kl"):
        batch = DistillationBatch([ROUTED], MASKS, old)
        func = make_distillation_loss_func(LAYOUT, batch, DistillationOptions(divergence))  # type: ignore[arg-type]
        losses[divergence] = func(deferred_logits(hidden, weight)[None])[0]
    # While the student is the old policy, the two have the same value.
    assert torch.allclose(losses["reverse_kl"], losses["importance_weighted_reverse_kl"], rtol=1e-9)
    assert losses["jensen_shannon"] < math.log(2) * sum(map(len, MASKS))


def test_masked_tokens_may_be_anything_and_are_not_computed() -> None:
    hidden, weight = student()
    spoiled = [
        FullDistribution.of(torch.where(mask[:, None] != 0, one.hidden[0], math.nan), one.heads[0])
        for one, mask in zip(teacher("math"), MASKS, strict=True)
    ]
    runs = []
    for distributions in (teacher("math"), spoiled):
        func = make_distillation_loss_func(LAYOUT, DistillationBatch([distributions], MASKS))
        loss = func(deferred_logits(hidden, weight)[None])[0]
        runs.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_teacher_without_weight_may_be_anything() -> None:
    hidden, weight = student()
    nothing = [FullDistribution.of(one.hidden[0] * math.nan, one.heads[0]) for one in teacher("code")]
    losses = []
    for teachers, weights in (([ROUTED], None), ([ROUTED, nothing], (2.0, 0.0))):
        options = DistillationOptions(teacher_weights=weights)
        func = make_distillation_loss_func(LAYOUT, DistillationBatch(teachers, MASKS), options)
        losses.append(func(deferred_logits(hidden, weight)[None])[0])
    assert losses[0] == losses[1]


def test_a_teacher_whose_vocabulary_is_padded_to_another_size() -> None:
    hidden, weight = student()
    padded = OutputHead(
        torch.cat([HEADS["math"].weight, random(20, 4, seed=8)]), torch.zeros(V + 20, dtype=torch.float64)
    )
    exact = OutputHead(HEADS["math"].weight[: V - 10])
    losses = []
    for head, ids, rows in ((padded, V - 10, V), (exact, None, V - 10)):
        distributions = FullDistribution.of(random(sum(RESPONSES), 4, seed=9), head).split(RESPONSES)
        batch = DistillationBatch([distributions], MASKS)
        func = make_distillation_loss_func(LAYOUT, batch, DistillationOptions(num_ids=ids))
        losses.append(func(deferred_logits(hidden, weight[:rows])[None])[0])
    assert torch.allclose(*losses, rtol=1e-10)


@pytest.mark.parametrize("name", ["routed", "mixed"])
def test_the_device_gets_the_hidden_states_of_tokens_that_count(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of h numbers for each of these tokens and each teacher that it is compared with."""
    moved = 0
    to = FullDistribution.to

    def noting(self: FullDistribution, *args: Any, **kwargs: Any) -> FullDistribution:
        nonlocal moved
        moved += self.nbytes
        return to(self, *args, **kwargs)

    monkeypatch.setattr(FullDistribution, "to", noting)
    hidden, weight = student()
    func = make_distillation_loss_func(LAYOUT, DistillationBatch(TEACHERS[name], MASKS))
    func(deferred_logits(hidden, weight)[None])
    counts = [int(mask.sum()) for mask in MASKS]
    sizes = {head: 8 * HEADS[head].weight.shape[1] for head in HEADS}
    of_sample = (
        [[sizes["math"]], [sizes["code"]], [sizes["code"]]] if name == "routed" else [[*sizes.values()]] * 3
    )
    assert moved == sum(count * sum(of) for count, of in zip(counts, of_sample, strict=True))


def test_a_microbatch_wholly_masked_reaches_every_parameter() -> None:
    hidden, weight = student()
    masks = [torch.zeros_like(mask) for mask in MASKS]
    func = make_distillation_loss_func(LAYOUT, DistillationBatch([ROUTED], masks))
    loss, count, _ = func(deferred_logits(hidden, weight)[None])
    assert loss == 0 and count == 0
    assert all(
        gradient is not None and not gradient.any()
        for gradient in torch.autograd.grad(loss, (hidden, weight))
    )


TOPK = vocab_parallel_topk(random(sum(RESPONSES), V, seed=3), 4).split(RESPONSES)
HEAD = HEADS["math"]
OF_MATH = teacher("math")[0]
REFUSED: dict[str, tuple[Any, str]] = {
    "kinds": (
        lambda: DistillationBatch([teacher("math"), TOPK], MASKS),
        "FullDistribution and TopKDistribution; pass one kind",
    ),
    "a missing teacher": (lambda: DistillationBatch([[None] * 3], MASKS), "NoneType; pass one kind"),  # type: ignore[list-item]
    "a mixture of kinds": (lambda: mix_teachers([OF_MATH, TOPK[0]]), "and TopKDistribution; pass one kind"),
    "lengths": (lambda: DistillationBatch([teacher("math")[::-1]], MASKS), "distributions of teacher 0"),
    "generalized": (
        lambda: make_distillation_loss_func(
            LAYOUT, DistillationBatch([ROUTED], MASKS), DistillationOptions("generalized_kl")
        ),
        "which is over k ids",
    ),
    "old": (lambda: DistillationBatch([ROUTED], MASKS, MIXED), "old is a mixture"),
    "num_ids": (
        lambda: make_distillation_loss_func(
            LAYOUT, DistillationBatch([TOPK], MASKS), DistillationOptions(num_ids=V)
        ),
        "num_ids is for full distributions",
    ),
    "loss of top-k": (
        lambda: distillation_loss([], [], DistillationBatch([ROUTED], MASKS), DistillationOptions()),
        "use make_distillation_loss_func",
    ),
    "rows": (
        lambda: FullDistribution((random(3, 4, seed=0), random(2, 4, seed=0)), (HEAD, HEAD), (1.0, 1.0)),
        r"hidden states are \[2, 4\], expected \[3, h\]",
    ),
    "hidden size": (lambda: FullDistribution.of(random(3, 7, seed=0), HEAD), r"\[3, 7\], expected \[3, h\]"),
    "numbers": (lambda: FullDistribution((), (), ()), "0 hidden states, 0 heads and 0 weights"),
    "cat": (lambda: FullDistribution.cat(ROUTED), "of different teachers"),
    "width": (lambda: HEAD.resharded(0, None), "width is 0, expected the rows"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(InvalidInputError, match=message):
        make()
