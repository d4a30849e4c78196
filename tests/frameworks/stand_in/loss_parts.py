"""What the losses of the stand-ins have in common: they copy logits, as those of frameworks do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Reduction = Callable[[Tensor], Tensor]


class NaiveEntropy(torch.autograd.Function):
    """Entropy of logits that are split over the vocabulary; it keeps a softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Any) -> Tensor:
        top = logits.amax(-1, keepdim=True)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        softmax = (logits - top).exp()
        total = softmax.sum(-1, keepdim=True)
        dist.all_reduce(total, group=group)
        softmax /= total
        mean = (softmax * logits).sum(-1, keepdim=True)
        dist.all_reduce(mean, group=group)
        ctx.save_for_backward(logits, softmax, mean)
        return (top + total.log() - mean).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, softmax, mean = ctx.saved_tensors
        return -softmax * (logits - mean) * gradient.unsqueeze(-1), None


def sum_of_sample_mean_of(batch: dict[str, Any]) -> Reduction:
    def sum_of_sample_mean(x: Tensor) -> Tensor:
        parts = zip(x.split(batch["response_lengths"]), batch["loss_masks"], strict=True)
        return torch.stack([(part * mask).sum() / mask.sum().clamp(min=1) for part, mask in parts]).sum()

    return sum_of_sample_mean


def what_is_scored(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}


def as_megatron_expects(loss: Tensor, log: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    return loss, torch.tensor(1), {"keys": list(log), "values": torch.tensor([1.0, *log.values()])}
