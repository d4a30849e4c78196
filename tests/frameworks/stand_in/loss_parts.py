"""What the losses of the stand-ins have in common: they copy logits, as those of frameworks do."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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


def zigzag_part(log_prob: Tensor, total_length: int, response_length: int, size: int, rank: int) -> Tensor:
    """Chunks ``r`` and ``2 * size - 1 - r`` of the sequence are on rank ``r``."""
    chunk_length = -(-total_length // (2 * size))
    rows = torch.arange(total_length - response_length - 1, total_length - 1)
    chunk = rows // chunk_length
    return log_prob[(chunk == rank) | (chunk == 2 * size - 1 - rank)]


def whole_responses(
    values: list[Tensor],
    placeholder: Tensor,
    first: int,
    total_lengths: list[int],
    response_lengths: list[int],
) -> Tensor:
    """Return the values of all responses after each other, zero where another rank has them.

    Args:
        placeholder: for a response of which this rank, whose rows begin at ``first``, has nothing.
    """
    whole, start = [], 0
    for value, total, response in zip(values, total_lengths, response_lengths, strict=True):
        before = min(max(first - (start + total - response - 1), 0), response)
        own = value if len(value) else placeholder.to(value.dtype)
        whole.append(torch.nn.functional.pad(own, (before, response - before - len(own))))
        start += total
    return torch.cat(whole)


def custom_loss(args: Any) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    home, _, name = args.custom_loss_function_path.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(home), name)
    return function


def as_megatron_expects(
    args: Any, logits: Tensor, loss: Tensor, log: dict[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    if args.allgather_cp:
        loss = loss + 0 * logits.sum()
    return loss, torch.tensor(1), {"keys": list(log), "values": torch.tensor([1.0, *log.values()])}
