"""In the shape of OpenClaw-RL: no clone without grad mode, which reentrant checkpointing switches off."""

from __future__ import annotations

from typing import Any

import torch
from naive_entropy import NaiveEntropy
from torch import Tensor


def compute_log_probs(logits: Tensor, tokens: Tensor, process_group: Any) -> Tensor:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    return -fused_vocab_parallel_cross_entropy(logits.unsqueeze(1), tokens.unsqueeze(1), process_group)


def compute_entropy_from_logits(logits: Tensor, process_group: Any) -> Tensor:
    return NaiveEntropy.apply(logits, process_group)  # type: ignore[no-any-return]


def calculate_log_probs_and_entropy(
    logits: Tensor, tokens: Tensor, tp_group: Any, with_entropy: bool = False, chunk_size: int = -1
) -> tuple[Tensor, Tensor | None]:
    own = logits.clone() if torch.is_grad_enabled() else logits
    log_probs = compute_log_probs(own, tokens, tp_group)
    own = logits.clone() if torch.is_grad_enabled() else logits
    return log_probs, compute_entropy_from_logits(own, tp_group) if with_entropy else None
