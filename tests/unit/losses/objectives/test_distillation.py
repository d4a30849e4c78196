"""The distillation loss over responses, and its closure for a forward step; on ranks, see tests/real."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import (
    DistillationBatch,
    DistillationOptions,
    SequenceLayout,
    TopKDistribution,
    average_metrics,
    distillation_loss,
    make_distillation_loss_func,
    mix_teachers,
    reverse_kl,
    route_teachers,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)

VOCABULARY, K, TEMPERATURE = 11, 4, 0.7
TOTALS, RESPONSES = [6, 4, 9], [3, 0, 8]
NAN = float("nan")


def logits_leaf(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, sum(TOTALS), VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()


def responses_of(logits: Tensor) -> Tensor:
    """The rows that predict response tokens, ``[sum(RESPONSES), V]``."""
    samples = zip(logits[0].split(TOTALS), RESPONSES, strict=True)
    return torch.cat([rows[len(rows) - response - 1 : -1] for rows, response in samples])


def batch_of(teachers: int = 1) -> DistillationBatch:
    """Teachers at the indices of an old policy, which is not the student any more."""
    generator = torch.Generator().manual_seed(0)
    old = vocab_parallel_topk(responses_of(logits_leaf(seed=7)), K, temperature=TEMPERATURE)

    def score(seed: int) -> list[TopKDistribution]:
        logits = responses_of(logits_leaf(seed)).detach()
        return TopKDistribution(
            old.indices, *vocab_parallel_log_probs_at(logits, old.indices, with_tail=True)
        ).split(RESPONSES)

    masks = [torch.rand(n, generator=generator) < 0.7 for n in RESPONSES]
    return DistillationBatch([score(2 + i) for i in range(teachers)], masks, old.split(RESPONSES))


def dense(logits: Tensor, batch: DistillationBatch, weights: list[float]) -> list[Tensor]:
    """The reverse KL of each token, without anything of the package."""
    log_p = (responses_of(logits) / TEMPERATURE).log_softmax(1)
    total = torch.zeros(len(log_p), dtype=log_p.dtype)
    for weight, teacher in zip(weights, batch.teachers, strict=True):
        whole = TopKDistribution.cat(teacher)
        p = log_p.exp().gather(1, whole.indices)
        p = torch.cat([p, 1 - p.sum(1, keepdim=True)], 1)
        q = torch.cat([whole.log_probs, whole.tail_log_prob[:, None]], 1)
        total = total + weight * (p * (p.log() - q)).sum(1)
    return list(total.split(RESPONSES))


def mean(values: list[Tensor], masks: list[Tensor], normalization: str) -> Tensor:
    kept = [value[mask] for value, mask in zip(values, masks, strict=True) if mask.any()]
    if normalization == "token":
        return torch.cat(kept).mean()
    if normalization == "sequence":
        return torch.stack([value.mean() for value in kept]).mean()
    return torch.stack([value.sum() / 8 for value in kept]).mean()


@pytest.mark.parametrize(
    ("normalizer", "inplace_backward", "recompute", "teachers", "normalization"),
    [  # every pair of values
        (None, False, False, 1, "token"),
        (1.5, True, True, 2, "token"),
        (None, True, False, 2, "sequence"),
        (1.5, False, True, 1, "sequence"),
        (None, True, True, 1, "constant"),
        (1.5, False, False, 2, "constant"),
    ],
)
def test_loss_and_gradient_are_the_dense_ones(
    normalizer: float | None, inplace_backward: bool, recompute: bool, teachers: int, normalization: Any
) -> None:
    batch = batch_of(teachers)
    options = DistillationOptions(
        normalization=normalization,
        constant_length=8,
        teacher_weights=None if teachers == 1 else (3.0, 1.0),
    )
    loss_func = make_distillation_loss_func(
        SequenceLayout.build(TOTALS, RESPONSES),
        batch,
        options,
        temperature=TEMPERATURE,
        inplace_backward=inplace_backward,
        recompute=recompute,
        normalizer=normalizer,
    )
    logits, leaf = logits_leaf(), logits_leaf()
    loss, count, metrics = loss_func(logits * 1)
    loss.backward()
    values = dense(leaf, batch, [1.0] if teachers == 1 else [0.75, 0.25])
    expected = mean(values, list(batch.loss_masks), normalization)
    expected.backward()
    tokens = metrics["loss"][1]
    assert torch.allclose(loss * (normalizer or 1) / tokens, expected)
    assert torch.allclose(logits.grad * (normalizer or 1) / tokens, leaf.grad, atol=1e-12)
    assert count.dtype == torch.int32
    assert count == (tokens if normalizer is None else 1)
    found = average_metrics([metrics])
    assert found["loss"] == pytest.approx(expected.item())
    mask = torch.cat(list(batch.loss_masks))
    assert found["divergence"] == pytest.approx(torch.cat(values)[mask].mean().item())
    tail = vocab_parallel_log_probs_at(
        responses_of(leaf), TopKDistribution.cat(batch.teachers[0]).indices, temperature=0.7, with_tail=True
    )[1]
    assert found["student_tail"] == pytest.approx(tail.exp()[mask].mean().item())
    of_teachers = [TopKDistribution.cat(t).tail_log_prob.exp()[mask].mean().item() for t in batch.teachers]
    shares = [1.0] if teachers == 1 else [0.75, 0.25]
    assert found["teacher_tail"] == pytest.approx(
        sum(a * b for a, b in zip(shares, of_teachers, strict=True))
    )


def student_at(batch: DistillationBatch, logits: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    indices = TopKDistribution.cat(batch.teachers[0]).indices
    found = vocab_parallel_log_probs_at(responses_of(logits), indices, temperature=0.7, with_tail=True)
    return [list(values.split(RESPONSES)) for values in found]  # type: ignore[return-value]


@pytest.mark.parametrize(
    "divergence",
    ["reverse_kl", "forward_kl", "jensen_shannon", "generalized_kl", "importance_weighted_reverse_kl"],
)
def test_the_loss_of_a_closure_is_that_of_its_log_probs(divergence: Any) -> None:
    batch, options = batch_of(), DistillationOptions(divergence=divergence, beta=0.3)
    layout = SequenceLayout.build(TOTALS, RESPONSES)
    found = make_distillation_loss_func(layout, batch, options, temperature=TEMPERATURE)(logits_leaf())
    expected = distillation_loss(*student_at(batch, logits_leaf()), batch, options)
    assert torch.allclose(found[0], expected[0])
    assert found[0] > 0 or divergence.startswith("importance")
    assert all(torch.allclose(found[2][name], expected[2][name]) for name in expected[2])


def test_divergences_differ() -> None:
    batch = batch_of()
    losses = {
        distillation_loss(
            *student_at(batch, logits_leaf()), batch, DistillationOptions(divergence=name, beta=beta)
        )[0].item()
        for name, beta in [
            ("reverse_kl", 0.5),
            ("forward_kl", 0.5),
            ("jensen_shannon", 0.5),
            ("jensen_shannon", 0.1),
            ("generalized_kl", 0.5),
            ("importance_weighted_reverse_kl", 0.5),
        ]
    }
    assert len(losses) == 6


@pytest.mark.parametrize("divergence", ["reverse_kl", "importance_weighted_reverse_kl"])
def test_masked_tokens_may_be_anything(divergence: Any) -> None:
    batch, options = batch_of(), DistillationOptions(divergence=divergence)

    def spoiled(distributions: Any) -> list[TopKDistribution]:
        return [
            TopKDistribution(
                d.indices,
                torch.where(mask[:, None], d.log_probs, NAN),
                torch.where(mask, d.tail_log_prob, NAN),
            )
            for d, mask in zip(distributions, batch.loss_masks, strict=True)
        ]

    results = []
    for one in (
        batch,
        replace(batch, teachers=[spoiled(t) for t in batch.teachers], old=spoiled(batch.old)),
    ):
        logits = logits_leaf()
        loss_func = make_distillation_loss_func(SequenceLayout.build(TOTALS, RESPONSES), one, options)
        loss, _, metrics = loss_func(logits)
        results.append((loss, torch.autograd.grad(loss, logits)[0], *metrics.values()))
    assert all(map(torch.equal, *results))
    masked = ~torch.cat(list(batch.loss_masks))
    assert (responses_of(results[0][1])[masked] == 0).all()


def test_a_teacher_that_is_on_another_stage_is_told() -> None:
    with pytest.raises(InvalidInputError, match="off the last pipeline stage"):
        DistillationBatch([None], [torch.ones(2)])  # type: ignore[list-item]


def test_a_microbatch_wholly_masked_is_a_loss_of_zero() -> None:
    batch = batch_of()
    batch = replace(batch, loss_masks=[torch.zeros(n) for n in RESPONSES])
    loss, count, _ = distillation_loss(*student_at(batch, logits_leaf()), batch, DistillationOptions())
    assert loss == 0
    assert loss.requires_grad
    assert count == 0


def test_routed_and_mixed_teachers_are_one_teacher() -> None:
    batch = batch_of(teachers=2)
    first, second = batch.teachers
    routed = route_teachers(["a", "a", "b"], {"a": first, "b": second})
    assert [of_sample is teacher for of_sample, teacher in zip(routed, first, strict=True)] == [1, 1, 0]
    mixed = [mix_teachers(both) for both in zip(first, second, strict=True)]
    log_probs, tails = student_at(batch, logits_leaf())
    losses = []
    for teacher in (routed, mixed):
        one = replace(batch, teachers=[teacher], loss_masks=[torch.ones(n) for n in RESPONSES])
        loss, count, _ = distillation_loss(log_probs, tails, one, DistillationOptions())
        whole = TopKDistribution.cat(teacher)
        assert torch.allclose(loss, reverse_kl(torch.cat(log_probs), torch.cat(tails), whole).sum())
        assert count == sum(RESPONSES)
        losses.append(loss)
    assert not torch.allclose(*losses)


def test_refusals() -> None:
    batch, layout = batch_of(2), SequenceLayout.build(TOTALS, RESPONSES)
    other = [vocab_parallel_topk(torch.randn(n, VOCABULARY).double(), K) for n in RESPONSES]
    for changes, message in (
        ({"teachers": []}, "0 teachers"),
        ({"loss_masks": []}, "0 responses"),
        ({"teachers": [batch.teachers[0][:2]]}, "teacher 0 have the shapes"),
        ({"old": batch.old[::-1]}, "of old have the shapes"),
        ({"old": other}, "different indices"),
        ({"teachers": [batch.teachers[0], other]}, "different indices"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            replace(batch, **changes)
    weighted = DistillationOptions(divergence="importance_weighted_reverse_kl")
    with pytest.raises(InvalidInputError, match="old is needed"):
        make_distillation_loss_func(layout, replace(batch, old=None), weighted)
    with pytest.raises(InvalidInputError, match="for 2 teacher"):
        make_distillation_loss_func(layout, batch, DistillationOptions(teacher_weights=(1.0,)))
    with pytest.raises(InvalidInputError, match="pass the full responses"):
        make_distillation_loss_func(SequenceLayout.build(TOTALS, [3, 1, 8]), batch)
    with pytest.raises(InvalidInputError, match="pass cp_group"):
        make_distillation_loss_func(SequenceLayout.build(TOTALS, RESPONSES, cp_size=2), batch)
    with pytest.raises(InvalidInputError, match="logits are"):
        make_distillation_loss_func(layout, batch)(logits_leaf()[:, 1:])
    log_probs, tails = student_at(batch, logits_leaf())
    for student in ((log_probs[:2], tails), (log_probs, tails[::-1])):
        with pytest.raises(InvalidInputError, match="have the shapes"):
            distillation_loss(*student, batch, DistillationOptions())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divergence": "kl"}, "must be one of"),
        ({"divergence": "jensen_shannon", "beta": 1.0}, "beta is 1.0"),
        ({"teacher_weights": (1.0, -1.0)}, "weights are"),
        ({"normalization": "mean"}, "normalization"),
        ({"normalization": "constant"}, "constant_length"),
    ],
)
def test_options_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        DistillationOptions(**options)
