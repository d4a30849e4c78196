"""Entropy of logits that are split over the vocabulary, the way frameworks compute it: it keeps a softmax."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class NaiveEntropy(torch.autograd.Function):
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
