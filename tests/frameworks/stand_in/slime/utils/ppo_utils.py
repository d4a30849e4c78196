"""In the shape of slime between v0.2.4 and v0.3.0: a clone per term, an entropy that may be a metric."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from loss_parts import NaiveEntropy
from torch import Tensor


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
            entropy = NaiveEntropy.apply(logits.clone(), tp_group)
    return compute_log_probs(logits.clone(), tokens, tp_group), entropy
