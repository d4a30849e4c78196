"""The distillation loss of frameworks, and the scores that the patch gives it, on TP 2 with zigzag CP 2."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_rl_patches.testing import cpu_backend, spawn_ranks

VOCABULARY, K, TEMPERATURE = 16, 3, 0.7
TOTALS, RESPONSES = [7, 5, 9, 4], [4, 2, 8, 1]
WEIGHTS = (3.0, 1.0)
TAIL_PADDING = 3


def _full(seed: int) -> list[Tensor]:
    """Logits of each whole sample."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, VOCABULARY, generator=generator, dtype=torch.float64) for n in TOTALS]


def _zigzag(sample: Tensor, cp_rank: int, cp_size: int) -> Tensor:
    """As slime's ``slice_with_cp``."""
    chunk = -(-len(sample) // (2 * cp_size))
    padded = torch.nn.functional.pad(sample, (0, 0, 0, 2 * cp_size * chunk - len(sample)))
    chunks = padded.split(chunk)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


def _on_this_rank(samples: list[Tensor], cp: tuple[int, int], tp: tuple[int, int]) -> Tensor:
    packed = torch.cat([_zigzag(sample, *cp) for sample in samples])
    padded = torch.nn.functional.pad(packed, (0, 0, 0, TAIL_PADDING))[None]
    return padded.chunk(tp[1], dim=2)[tp[0]].contiguous()


def _responses(samples: list[Tensor]) -> list[Tensor]:
    return [sample[-response - 1 : -1] for sample, response in zip(samples, RESPONSES, strict=True)]


def _dense(student: list[Tensor], teachers: list[list[Tensor]], masks: list[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for sample, (rows, mask) in enumerate(zip(_responses(student), masks, strict=True)):
        p = (rows / TEMPERATURE).softmax(1)
        q = [(_responses(teacher)[sample] / TEMPERATURE).softmax(1) for teacher in teachers]
        mixed = sum(w / sum(WEIGHTS) * one for w, one in zip(WEIGHTS, q, strict=True))
        ids = rows.topk(K).indices
        p_k, q_k = ((torch.cat([x.gather(1, ids), 1 - x.gather(1, ids).sum(1, True)], 1)) for x in (p, mixed))
        kl = (p_k * (p_k / q_k).log()).sum(1)
        total = total + (kl * mask).sum() / mask.sum().clamp(min=1)
    return total


def _masks() -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.rand(n, generator=generator) < 0.7 for n in RESPONSES]


def _sharded() -> dict[str, float]:
    with cpu_backend():
        import torch.distributed as dist
        from megatron.core import parallel_state

        from megatron_rl_patches.frameworks.distillation_loss import layout_of, topk_opd_loss
        from megatron_rl_patches.frameworks.distillation_teachers import TopKScorer
        from megatron_rl_patches.losses import mix_teachers

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, context_parallel_size=2)
        cp = parallel_state.get_context_parallel_rank(), 2
        tp = parallel_state.get_tensor_model_parallel_rank(), 2
        masks = _masks()
        args = SimpleNamespace(rollout_temperature=TEMPERATURE, allgather_cp=False, opd_top_k=K)
        batch: dict[str, Any] = {
            "total_lengths": TOTALS,
            "response_lengths": RESPONSES,
            "loss_masks": masks,
        }
        logits = _on_this_rank(_full(0), cp, tp).requires_grad_()
        layout, _ = layout_of(args, batch, logits)

        def sum_of_sample_mean(x: Tensor) -> Tensor:
            """As slime's: local values by sample, over counts of the whole."""
            local = layout.local_parts(masks)
            parts = zip(x.split([len(mask) for mask in local]), local, masks, strict=True)
            return torch.stack([(a * m).sum() / mask.sum().clamp(min=1) for a, m, mask in parts]).sum()

        scorer = TopKScorer(SimpleNamespace(args=args))
        scorer.batch = batch
        old = scorer._topk(logits.detach(), args=args)[1]["topk"]
        batch["teacher_topk_indices"] = [one.indices for one in old]
        scored = [scorer._at_ids(_on_this_rank(_full(seed), cp, tp), args=args)[1]["topk"] for seed in (1, 2)]
        mixed = [mix_teachers(of_sample, WEIGHTS) for of_sample in zip(*scored, strict=True)]
        batch["teacher_topk_log_probs"] = [one.log_probs for one in mixed]
        batch["teacher_topk_tail"] = [one.tail_log_prob for one in mixed]
        loss, _ = topk_opd_loss(args, batch, logits, sum_of_sample_mean)
        loss.backward()
        assert logits.grad is not None

        leaves = [sample.requires_grad_() for sample in _full(0)]
        dense = _dense(leaves, [_full(1), _full(2)], masks)
        gradients = list(torch.autograd.grad(dense, leaves))
        total = loss.detach().clone()
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
        expected = _on_this_rank(gradients, cp, tp)
        return {
            "loss": float((total - dense).abs() / dense),
            "gradient": float((logits.grad - expected).abs().max() / expected.abs().max()),
        }


def test_scores_loss_and_gradient_are_the_dense_ones() -> None:
    for errors in spawn_ranks(_sharded, 4, timeout=120):
        # What the framework keeps of the teachers is float32 where its logits are; here the loss makes it so.
        assert errors["loss"] < 1e-6
        assert errors["gradient"] < 1e-5
