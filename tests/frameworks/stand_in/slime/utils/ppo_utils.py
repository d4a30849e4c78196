"""In the shape of slime between v0.2.4 and v0.3.0: a clone per term, an entropy that may be a metric.

slime compiles ``compute_approx_kl`` and ``compute_policy_loss``.
"""

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor


def compute_entropy(logits: Tensor, process_group: Any) -> Tensor:
    log_p = gather_from_tensor_model_parallel_region(logits, process_group).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, kl_loss_type: str, importance_ratio: Tensor | None = None
) -> Tensor:
    difference = log_probs.float() - log_probs_base.float()
    kl = (-difference).exp() - 1 + difference
    if importance_ratio is not None:
        kl = importance_ratio * kl
    return kl.clamp(-10, 10) if kl_loss_type == "low_var_kl" else kl


def compute_policy_loss(
    ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    ratio = (-ppo_kl).exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    return torch.maximum(unclipped, clipped), (clipped > unclipped).float()


def compute_log_probs(logits: Tensor, tokens: Tensor, process_group: Any) -> Tensor:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    return -fused_vocab_parallel_cross_entropy(logits.unsqueeze(1), tokens.unsqueeze(1), process_group)


def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: Any,
    with_entropy: bool = False,
    chunk_size: int = -1,
    need_entropy_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    entropy = None
    if with_entropy:
        with nullcontext() if need_entropy_grad else torch.no_grad():
            entropy = compute_entropy(logits.clone(), tp_group)
    return compute_log_probs(logits.clone(), tokens, tp_group), entropy
