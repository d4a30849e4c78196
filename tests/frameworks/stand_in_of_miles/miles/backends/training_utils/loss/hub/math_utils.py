"""In the shape of miles since September 2026: a float32 copy for the log-probs, another one for the entropy.

Megatron's fused cross entropy rounds gradients to bfloat16, and keeps a softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from slime.utils.ppo_utils import NaiveEntropy
from torch import Tensor


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, kl_loss_type: str, importance_ratio: Tensor | None = None
) -> Tensor:
    difference = log_probs_base - log_probs
    if kl_loss_type == "low_var_kl":
        difference = difference.clamp(-20, 20)
    kl = difference.exp() - 1 - difference
    return kl if importance_ratio is None else importance_ratio * kl


def compute_policy_loss(
    ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    ratio = (-ppo_kl).clamp(-20, 20).exp()
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    return torch.maximum(-ratio * advantages, clipped), (clipped > -ratio * advantages).float()


def _float32_copy(logits: Tensor, temperature: float) -> Tensor:
    copy = logits.to(torch.float32, copy=True)
    return copy.div_(temperature) if temperature > 0 else copy


def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: Any,
    with_entropy: bool = False,
    entropy_requires_grad: bool = True,
    chunk_size: int = -1,
    true_on_policy: bool = False,
    vocab_size: int | None = None,
    sampling_mask: Tensor | None = None,
    temperature: float = 1.0,
    debug_unified_grad_fused_logprob: bool = False,
) -> tuple[Tensor, Tensor | None]:
    if len(logits) == 0:
        return logits.new_zeros((0,)), logits.new_zeros((0,)) if with_entropy else None
    sampled_from = _float32_copy(logits, temperature)
    if sampling_mask is not None:
        sampled_from.masked_fill_(~sampling_mask, float("-inf"))
    losses = fused_vocab_parallel_cross_entropy(sampled_from[:, None], tokens[:, None], tp_group)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_requires_grad):
        copy = _float32_copy(logits, temperature)
        entropy = NaiveEntropy.apply(copy, tp_group) if with_entropy else None
    return -losses, entropy
