"""Losses of the answers, for the forward step of :mod:`.training`."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state

from ..losses import (
    DistillationBatch,
    PolicyBatch,
    SequenceLayout,
    make_distillation_loss_func,
    make_loss_func,
)
from .digits import DIGITS
from .policy import Batch
from .training import LossFunc


def policy_loss(batch: Batch) -> LossFunc:
    """Return PPO's loss of a batch.

    For advantages of one and no old log-probs, its gradient is that of the negative log-likelihood.
    """
    tokens, advantages = batch["tokens"], list(batch["advantages"])
    masks = [torch.ones_like(advantage) for advantage in advantages]
    policy_batch = PolicyBatch(advantages, masks, old_log_probs=batch.get("log_probs"))
    return make_loss_func(list(tokens), _layout(tokens), policy_batch, with_entropy=False, **_options())


def distillation_loss(batch: Batch) -> LossFunc:
    """Return the reverse KL divergence of a batch from the teachers."""

    def loss_func(logits_bsv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        # The last pipeline stage calls this function, and only that stage has the teachers' distributions.
        masks = [torch.ones(DIGITS)] * len(batch["tokens"])
        distillation_batch = DistillationBatch([batch["teachers"]], masks)
        distill = make_distillation_loss_func(_layout(batch["tokens"]), distillation_batch, **_options())
        return distill(logits_bsv)

    return loss_func


def _options() -> dict[str, Any]:
    return {
        "tp_group": parallel_state.get_tensor_model_parallel_group(),
        "cp_group": parallel_state.get_context_parallel_group(),
        "recompute": True,
    }


def _layout(tokens_bs: torch.Tensor) -> SequenceLayout:
    count, length = tokens_bs.shape
    return SequenceLayout.build(
        [length] * count,
        [DIGITS] * count,
        qkv_format="bshd",
        max_seq_lens=[length] * count,
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        device=tokens_bs.device,
    )
