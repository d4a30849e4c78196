"""The distillation loss over responses, and its closure for a forward step; on ranks, see tests/real."""

from __future__ import annotations

from collections.abc import Callable
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
    SequenceLayout,
    TopKDistribution,
    average_metrics,
    distillation_loss,
    forward_kl,
    generalized_kl,
    importance_weighted_reverse_kl,
    jensen_shannon,
    make_distillation_loss_func,
    reverse_kl,
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
    weights = [1.0] if teachers == 1 else [0.75, 0.25]
    values = dense(leaf, batch, weights)
    expected = mean(values, list(batch.loss_masks), normalization)
    expected.backward()
    tokens = metrics["loss"][1]
    assert torch.allclose(loss * (normalizer or 1) / tokens, expected)
    assert torch.allclose(logits.grad * (normalizer or 1) / tokens, leaf.grad, atol=1e-12)
    assert count.dtype == torch.int32
    assert count == (tokens if normalizer is None else 1)
    mask = torch.cat(list(batch.loss_masks))
    student_tails = torch.cat(student_at(batch, leaf)[1])
    teacher_tails = [TopKDistribution.cat(teacher).tail_log_prob.exp() for teacher in batch.teachers]
    assert average_metrics([metrics]) == pytest.approx(
        {
            "loss": expected.item(),
            "divergence": torch.cat(values)[mask].mean().item(),
            "student_tail": student_tails.exp()[mask].mean().item(),
            "teacher_tail": sum(
                w * t[mask].mean().item() for w, t in zip(weights, teacher_tails, strict=True)
            ),
        }
    )


def student_at(batch: DistillationBatch, logits: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    indices = TopKDistribution.cat(batch.teachers[0]).indices
    found = vocab_parallel_log_probs_at(responses_of(logits), indices, temperature=0.7, with_tail=True)
    return [list(values.split(RESPONSES)) for values in found]  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("divergence", "of_tokens"),
    [
        ("reverse_kl", reverse_kl),
        ("forward_kl", forward_kl),
        ("jensen_shannon", partial(jensen_shannon, beta=0.3)),
        ("generalized_kl", generalized_kl),
        ("importance_weighted_reverse_kl", importance_weighted_reverse_kl),
    ],
)
def test_the_losses_are_those_of_the_divergence(divergence: Any, of_tokens: Callable[..., Tensor]) -> None:
    batch, options = batch_of(), DistillationOptions(divergence=divergence, beta=0.3)
    layout = SequenceLayout.build(TOTALS, RESPONSES)
    of_closure = make_distillation_loss_func(layout, batch, options, temperature=TEMPERATURE)(logits_leaf())
    student = student_at(batch, logits_leaf())
    of_log_probs = distillation_loss(*student, batch, options)
    old = [TopKDistribution.cat(batch.old)] if divergence.startswith("importance") else []
    expected = of_tokens(*map(torch.cat, student), TopKDistribution.cat(batch.teachers[0]), *old)
    mask = torch.cat(list(batch.loss_masks))
    for loss, count, metrics in (of_closure, of_log_probs):
        assert torch.allclose(loss, expected[mask].sum())
        assert count == mask.sum()
        assert all(torch.allclose(metrics[name], of_log_probs[2][name]) for name in metrics)


@pytest.mark.parametrize("divergence", ["reverse_kl", "importance_weighted_reverse_kl"])
def test_masked_tokens_may_be_anything(divergence: Any) -> None:
    batch, options = batch_of(), DistillationOptions(divergence=divergence)

    def spoiled(distributions: Any) -> list[TopKDistribution]:
        return [
            TopKDistribution(
                one.indices, one.log_probs.where(mask[:, None], NAN), one.tail_log_prob.where(mask, NAN)
            )
            for one, mask in zip(distributions, batch.loss_masks, strict=True)
        ]

    of_nan = replace(batch, teachers=[spoiled(one) for one in batch.teachers], old=spoiled(batch.old))
    results = []
    for one in (batch, of_nan):
        logits = logits_leaf()
        loss_func = make_distillation_loss_func(SequenceLayout.build(TOTALS, RESPONSES), one, options)
        loss, _, metrics = loss_func(logits)
        results.append((loss, torch.autograd.grad(loss, logits)[0], *metrics.values()))
    assert all(map(torch.equal, *results))
    masked = ~torch.cat(list(batch.loss_masks))
    assert (responses_of(results[0][1])[masked] == 0).all()


def test_a_microbatch_wholly_masked_is_a_loss_of_zero() -> None:
    batch = batch_of()
    batch = replace(batch, loss_masks=[torch.zeros(n) for n in RESPONSES])
    loss, count, _ = distillation_loss(*student_at(batch, logits_leaf()), batch, DistillationOptions())
    assert loss == 0
    assert loss.requires_grad
    assert count == 0


def test_refusals() -> None:
    batch, layout = batch_of(2), SequenceLayout.build(TOTALS, RESPONSES)
    other = [vocab_parallel_topk(torch.randn(n, VOCABULARY).double(), K) for n in RESPONSES]
    for changes, message in (
        ({"teachers": []}, "0 teachers"),
        ({"teachers": [None]}, "off the last pipeline stage"),
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
