"""A mixture of experts teaches a dense student, and the other way around, on two expert-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_rl_patches import applied
from megatron_rl_patches.inference import (
    build_inference_model,
    forward_hidden_states,
    forward_topk,
    output_head,
)
from megatron_rl_patches.losses import (
    DistillationBatch,
    FullDistribution,
    SequenceLayout,
    make_distillation_loss_func,
)
from megatron_rl_patches.testing import tiny_model
from tests.ranks import on_ranks

SAMPLES, LENGTH, RESPONSE, VOCABULARY = 2, 16, 10, 32
LENGTHS, RESPONSES = [LENGTH] * SAMPLES, [RESPONSE] * SAMPLES


def fill(chunk: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in chunk.named_parameters():
        values = torch.randn(parameter.shape, generator=generator) * 0.2
        parameter.data.copy_(values + ("norm" in name and "weight" in name))


def gradients_of(student: Any, tokens: torch.Tensor, loss_of: Any) -> tuple[float, dict[str, torch.Tensor]]:
    positions = torch.arange(LENGTH).expand(SAMPLES, LENGTH)
    student.zero_grad()
    loss = loss_of(student(tokens, positions, None))
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
    return float(loss), gradients


@pytest.mark.parametrize("way", ["full", "top-k"])
@pytest.mark.parametrize(("teacher_kind", "student_kind"), [("moe", "dense"), ("dense", "moe")])
@on_ranks(2)
def test_divergence_and_gradients(teacher_kind: str, student_kind: str, way: str) -> None:
    models = {"moe": tiny_model("moe", ep=2), "dense": tiny_model("dense")}
    models["moe"].initialize()  # the groups of both
    [student] = models[student_kind].chunks()
    fill(student, 3)
    tiny = models[teacher_kind]
    teacher: Any = build_inference_model(tiny.provider, tiny.transformer_config(), dtype="fp32")
    fill(teacher[0], 7)
    rank = torch.distributed.get_rank()
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(rank))
    microbatches = [{"tokens": tokens, "lengths": LENGTHS, "response_lengths": RESPONSES}]
    if way == "full":
        head, hidden = output_head(teacher), forward_hidden_states(teacher, microbatches, progress=False)
        assert head is not None and hidden is not None
        targets: list[Any] = [FullDistribution.from_hidden(hidden_lh, head) for hidden_lh in hidden]
    else:  # as many ids as there are: the same divergence
        targets = forward_topk(teacher, microbatches, VOCABULARY, progress=False) or []
    layout = SequenceLayout.build(LENGTHS, RESPONSES, qkv_format="bshd", max_seq_lens=LENGTHS)
    batch = DistillationBatch([targets], [torch.ones(RESPONSE)] * SAMPLES)

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        return make_distillation_loss_func(layout, batch)(logits)[0]

    with torch.no_grad():
        positions = torch.arange(LENGTH).expand(SAMPLES, LENGTH)
        log_q = teacher[0](tokens, positions, None)[:, -RESPONSE - 1 : -1].double().log_softmax(-1)

    def dense(logits: torch.Tensor) -> torch.Tensor:
        log_p = logits[:, -RESPONSE - 1 : -1].double().log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum()

    expected, by_formula = gradients_of(student, tokens, dense)
    with applied("lean-head"):
        found, gradients = gradients_of(student, tokens, loss_of)
    assert expected > 1.0 and found == pytest.approx(expected, rel=1e-5)
    assert gradients.keys() == by_formula.keys()
    for name, gradient in by_formula.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, name
