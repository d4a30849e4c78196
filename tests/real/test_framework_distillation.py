"""The distillation loss of frameworks, and the scores that the patch gives it, on TP 2 with zigzag CP 2."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl_patches.frameworks.distillation_loss import layout_of, opd_loss
from megatron_rl_patches.frameworks.distillation_teachers import TeacherScorer
from megatron_rl_patches.losses import FullDistribution, OutputHead, deferred_logits, mix_teachers
from megatron_rl_patches.testing import TinyModel
from tests.ranks import on_ranks
from tests.unit.losses.sequences.cp_reference import Case

VOCABULARY, K, TEMPERATURE = 16, 3, 0.7
CASE = Case(prompts=(3, 3, 1, 3), responses=(4, 2, 8, 1), cp_size=2, tail=3)
WEIGHTS = (3.0, 1.0)
MASKS = [torch.rand(n, generator=torch.Generator().manual_seed(9 + n)) < 0.7 for n in CASE.responses]


def _full(seed: int) -> list[Tensor]:
    """Logits of each whole sample."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, VOCABULARY, generator=generator, dtype=torch.float64) for n in CASE.totals]


def _on_this_rank(samples: list[Tensor], cp_rank: int, tp_rank: int, tp_size: int = 2) -> Tensor:
    return CASE.shard(samples, cp_rank).chunk(tp_size, dim=2)[tp_rank].contiguous()


def _dense(student: list[Tensor], teachers: list[list[Tensor]], top_k: int | str) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    of_predictors = [CASE.of_predictors(samples) for samples in (student, *teachers)]
    for mask, rows, *of_teachers in zip(MASKS, *of_predictors, strict=True):
        p, *q = ((each / TEMPERATURE).softmax(1) for each in (rows, *of_teachers))
        mixed = sum(w / sum(WEIGHTS) * one for w, one in zip(WEIGHTS, q, strict=True))
        if top_k != "full":
            ids = rows.topk(int(top_k)).indices
            at_ids = p.gather(1, ids), mixed.gather(1, ids)
            p, mixed = (torch.cat([x, 1 - x.sum(1, True)], 1) for x in at_ids)
        kl = (p * (p / mixed).log()).sum(1)
        total = total + (kl * mask).sum() / mask.sum().clamp(min=1)
    return total


@pytest.mark.parametrize("top_k", [K, "full"])
@on_ranks(4)
def test_scores_loss_and_gradient_are_the_dense_ones(top_k: int | str) -> None:
    TinyModel(tp=2, cp=2).initialize()
    cp_rank = parallel_state.get_context_parallel_rank()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    args = SimpleNamespace(rollout_temperature=TEMPERATURE, allgather_cp=False, opd_top_k=top_k)
    lengths = {"total_lengths": CASE.totals, "response_lengths": list(CASE.responses)}
    batch: dict[str, Any] = {**lengths, "loss_masks": MASKS}
    logits = _on_this_rank(_full(0), cp_rank, tp_rank).requires_grad_()
    layout, _ = layout_of(args, batch, logits)

    def sum_of_sample_mean(x: Tensor) -> Tensor:
        """As slime's: local values by sample, over counts of the whole."""
        local = layout.local_parts(MASKS)
        parts = zip(x.split([len(mask) for mask in local]), local, MASKS, strict=True)
        return torch.stack([(a * m).sum() / mask.sum().clamp(min=1) for a, m, mask in parts]).sum()

    scorer = TeacherScorer(SimpleNamespace(args=args))
    scorer.batch = batch
    # Of this output layer the logits are the hidden states.
    layer = torch.eye(VOCABULARY, dtype=torch.float64).chunk(2)[tp_rank]
    scored: list[Any] = []

    def collected(logits: Tensor, score: Any) -> Any:
        return scorer._collected(lambda collect: collect(logits, args=args)[1], score)

    if top_k != "full":
        batch["opd_old"] = collected(logits.detach(), scorer._topk)
    for seed in (1, 2):
        if top_k == "full":
            hidden = deferred_logits(_on_this_rank(_full(seed), cp_rank, 0, 1), layer)
            found, head = collected(hidden, scorer._hidden), OutputHead(layer)
            scored.append([FullDistribution.from_hidden(hidden_lh, head) for hidden_lh in found])
        else:
            teacher = _on_this_rank(_full(seed), cp_rank, tp_rank)
            scored.append(collected(teacher, scorer._at_ids))
    pairs = zip(*scored, strict=True)
    batch["opd_teachers"] = [(mix_teachers(of_sample, WEIGHTS),) for of_sample in pairs]
    loss, _ = opd_loss(args, batch, logits, sum_of_sample_mean)
    loss.backward()

    leaves = [sample.requires_grad_() for sample in _full(0)]
    dense = _dense(leaves, [_full(1), _full(2)], top_k)
    gradients = list(torch.autograd.grad(dense, leaves))
    total = loss.detach().clone()
    dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
    expected = _on_this_rank(gradients, cp_rank, tp_rank)
    # What the framework keeps of the teachers is float32 where its logits are; here the loss makes it so.
    torch.testing.assert_close(total, dense, rtol=1e-6, atol=0)
    assert (logits.grad - expected).abs().max() < 1e-5 * expected.abs().max()
