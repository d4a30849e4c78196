"""The loss in the frameworks' convention, against a float64 reference; on several ranks, see tests/real."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.frameworks import distillation_loss as framework_distillation
from megatron_rl_patches.frameworks.distillation_loss import opd_loss
from megatron_rl_patches.losses import (
    TopKDistribution,
    deferred_logits,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)

VOCABULARY, K, TEMPERATURE = 13, 4, 0.7
TOTALS, RESPONSES = [6, 4, 9], [3, 1, 7]
PADDING = 5


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framework_distillation, "_parallel_state", lambda: (0, 1, None))


def logits_leaf() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(
        1, sum(TOTALS) + PADDING, VOCABULARY, generator=generator, dtype=torch.float64
    ).requires_grad_()


def responses_of(logits: Tensor) -> Tensor:
    samples = zip(logits[0, : sum(TOTALS)].split(TOTALS), RESPONSES, strict=True)
    return torch.cat([rows[len(rows) - response - 1 : -1] for rows, response in samples])


def batch(**changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    teacher = torch.randn(sum(RESPONSES), VOCABULARY, generator=generator, dtype=torch.float64)
    top = vocab_parallel_topk(teacher, K)
    return {
        "total_lengths": TOTALS,
        "response_lengths": RESPONSES,
        "loss_masks": [torch.tensor([1, 0, 1]), torch.tensor([1]), torch.tensor([1, 1, 1, 0, 0, 1, 1])],
        "teacher_topk_indices": list(top.indices.split(RESPONSES)),
        "teacher_topk_log_probs": list(top.log_probs.float().split(RESPONSES)),
        **changes,
    }


def sum_of_sample_mean(masks: list[Tensor]) -> Any:
    def reduce(x: Tensor) -> Tensor:
        parts = zip(x.split(RESPONSES), masks, strict=True)
        means = ((part * mask).sum() / mask.sum().clamp(min=1) for part, mask in parts)
        return sum(means)  # type: ignore[return-value]

    return reduce


def loss_of(logits: Tensor, microbatch: dict[str, Any], **changes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    args = SimpleNamespace(**{"rollout_temperature": TEMPERATURE, "allgather_cp": False, **changes})
    return opd_loss(args, microbatch, logits, sum_of_sample_mean(microbatch["loss_masks"]))


def dense(logits: Tensor, microbatch: dict[str, Any], divergence: str = "reverse_kl") -> Tensor:
    """Over the whole vocabulary, with the stored tail of the teacher."""
    log_p = torch.log_softmax(responses_of(logits) / TEMPERATURE, 1)
    ids = torch.cat(microbatch["teacher_topk_indices"])
    outside = torch.ones_like(log_p).scatter_(1, ids, 0).bool()
    tail = log_p.masked_fill(~outside, float("-inf")).logsumexp(1)
    log_q = torch.cat(microbatch["teacher_topk_log_probs"]).double()
    q_tail = torch.log1p(-log_q.exp().sum(1))
    p, q = torch.cat([log_p.gather(1, ids), tail[:, None]], 1), torch.cat([log_q, q_tail[:, None]], 1)
    a, b = (p, q) if divergence == "reverse_kl" else (q, p)
    return sum_of_sample_mean(microbatch["loss_masks"])((a.exp() * (a - b)).sum(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
def test_value_and_gradient_are_the_dense_ones(divergence: str) -> None:
    logits, microbatch = logits_leaf(), batch()
    loss, metrics = loss_of(logits, microbatch, opd_divergence=divergence)
    [gradient] = torch.autograd.grad(loss, logits)
    expected = dense(logits, microbatch, divergence)
    [expected_gradient] = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)
    assert set(metrics) == {"loss", "opd_student_tail", "opd_teacher_tail"}
    assert all(value.shape == () and not value.requires_grad for value in metrics.values())
    assert torch.equal(metrics["loss"], loss.detach())


@pytest.mark.parametrize("divergence", [{}, {"opd_divergence": "jensen_shannon"}], ids=str)
def test_options_that_a_framework_lacks_have_their_defaults(divergence: dict[str, Any]) -> None:
    microbatch = batch()
    reduce = sum_of_sample_mean(microbatch["loss_masks"])
    loss, _ = opd_loss(SimpleNamespace(**divergence), microbatch, logits_leaf(), reduce)
    defaults = {
        "rollout_temperature": 1.0,
        "entropy_coef": 0.0,
        "opd_divergence": "reverse_kl",
        "opd_beta": 0.5,
    }
    assert torch.equal(loss, loss_of(logits_leaf(), microbatch, **{**defaults, **divergence})[0])


def test_the_weights_are_those_of_several_teachers() -> None:
    generator = torch.Generator().manual_seed(3)
    samples = vocab_parallel_topk(responses_of(logits_leaf()).detach(), K)
    logits = [torch.randn(sum(RESPONSES), VOCABULARY, generator=generator).double() for _ in range(2)]
    at_ids = [vocab_parallel_log_probs_at(one, samples.indices, with_tail=True) for one in logits]
    first, second = (TopKDistribution(samples.indices, *one).split(RESPONSES) for one in at_ids)

    def loss(*teachers: Any) -> Tensor:
        microbatch = batch(opd_teachers=list(zip(*teachers, strict=True)))
        return loss_of(logits_leaf(), microbatch, opd_teacher_weights=(3.0, 1.0))[0]

    torch.testing.assert_close(loss(first, second), 0.75 * loss(first) + 0.25 * loss(second))


def test_deferred_logits_are_not_materialized() -> None:
    leaf, microbatch = logits_leaf(), batch()
    logits = deferred_logits(leaf, torch.eye(VOCABULARY, dtype=torch.float64), tile_bytes=512)
    loss, _ = loss_of(logits, microbatch)
    expected, _ = loss_of(leaf, microbatch)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    gradients = [torch.autograd.grad(one, leaf)[0] for one in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
    assert logits.is_deferred


def test_padded_batches() -> None:
    microbatch = batch(max_seq_lens=[10] * 3)
    packed = logits_leaf()
    padded = torch.zeros(3, 10, VOCABULARY, dtype=torch.float64)
    for sample, rows in enumerate(packed.detach()[0, : sum(TOTALS)].split(TOTALS)):
        padded[sample, : len(rows)] = rows
    loss, _ = loss_of(padded.requires_grad_(), microbatch, qkv_format="bshd")
    assert torch.equal(loss, loss_of(packed, microbatch)[0])


def test_the_tail_of_the_teacher() -> None:
    """One that is given is used; without one, probabilities that add up to one in float32 leave 1e-7."""
    log_probs = batch()["teacher_topk_log_probs"]
    tails = [torch.log1p(-values.double().exp().sum(1)).float() for values in log_probs]
    loss, known, other, no_cliff = (
        loss_of(logits_leaf(), batch(**changes))[0]
        for changes in (
            {},
            {"teacher_topk_tail": tails},
            {"teacher_topk_tail": [tail - 3 for tail in tails]},
            {"teacher_topk_log_probs": [values.log_softmax(1) for values in log_probs]},
        )
    )
    torch.testing.assert_close(known, loss)
    assert other > loss and no_cliff < 100


def test_what_the_teacher_did_not_score_does_not_count() -> None:
    """As OpenClaw-RL fills it up: log-probabilities of zero at the ids 0 to k - 1."""
    microbatch = batch()
    microbatch["teacher_topk_log_probs"][2][:3] = 0.0
    microbatch["teacher_topk_indices"][2][:3] = torch.arange(K)
    logits = logits_leaf()
    loss, metrics = loss_of(logits, microbatch)
    [gradient] = torch.autograd.grad(loss, logits)
    assert metrics["opd_teacher_tail"] < loss_of(logits, batch())[1]["opd_teacher_tail"]
    start = TOTALS[0] + TOTALS[1] + TOTALS[2] - RESPONSES[2] - 1
    assert not gradient[0, start : start + 3].any()
    assert gradient[0, start + 5 :].any()


def test_the_importance_ratio_needs_the_old_policy() -> None:
    microbatch, name = batch(), "importance_weighted_reverse_kl"
    with pytest.raises(InvalidInputError, match="needs opd_old in the batch"):
        loss_of(logits_leaf(), microbatch, opd_divergence=name)
    of_all = vocab_parallel_topk(responses_of(logits_leaf()).detach(), K, temperature=TEMPERATURE)
    samples = of_all.split(RESPONSES)
    both = {"opd_teachers": [(sample,) for sample in samples], "opd_old": samples}
    loss, _ = loss_of(logits_leaf(), {**microbatch, **both}, opd_divergence=name)
    assert loss == 0  # where they agree the advantage is zero


@pytest.mark.parametrize(
    ("changes", "of_batch", "message"),
    [
        ({"allgather_cp": True}, {}, "--allgather-cp"),
        ({"entropy_coef": 0.1}, {}, "--entropy-coef is 0.1"),
        ({"opd_divergence": "kl"}, {}, "divergence must be one of"),
        ({}, {"teacher_topk_log_probs": None}, "--distill-topk"),
        ({}, {"teacher_topk_log_probs": [torch.zeros(3, K)] * 3}, r"are of \[3, 3, 3\] tokens"),
    ],
)
def test_refuses(changes: dict[str, Any], of_batch: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        loss_of(logits_leaf(), batch(**of_batch), **changes)
