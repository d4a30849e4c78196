"""In the shape of miles: an entropy that may be a metric, and a way that keeps an engine's bits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from loss_parts import NaiveEntropy
from torch import Tensor


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.nan_to_num(nan=0.0).clamp(-20, 20)


def compute_approx_kl(log_probs: Tensor, log_probs_base: Tensor, kl_loss_type: str) -> Tensor:
    log_ratio = _clamped(log_probs_base - log_probs)
    return log_ratio.exp() - 1 - log_ratio


def compute_policy_loss(ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float) -> Tensor:
    ratio = _clamped(-ppo_kl).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages)


def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: Any,
    with_entropy: bool = False,
    entropy_requires_grad: bool = True,
    chunk_size: int = -1,
    true_on_policy: bool = False,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    if true_on_policy:
        log_softmax = logits.log_softmax(-1)
        log_probs = log_softmax.gather(1, tokens[:, None])
        return log_probs, -(log_softmax.exp() * log_softmax).sum(-1) if with_entropy else None
    if len(logits) == 0:
        return logits.new_zeros(0), logits.new_zeros(0) if with_entropy else None
    entropy = None
    if with_entropy:
        with nullcontext() if entropy_requires_grad else torch.no_grad():
            entropy = NaiveEntropy.apply(logits.to(torch.float32, copy=True), tp_group)
    logits = logits.to(torch.float32, copy=True).unsqueeze(1)
    return -fused_vocab_parallel_cross_entropy(logits, tokens.unsqueeze(1), tp_group), entropy
