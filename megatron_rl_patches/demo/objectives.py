"""What the demo trains on: losses of the answers, for the forward step of :mod:`.training`.

The vocabulary may be split over ranks and stays so; what a loss computes is computed again in backward and
not kept.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state

from ..losses import (
    DistillationBatch,
    PolicyBatch,
    PolicyOptions,
    SequenceLayout,
    checkpointed,
    make_distillation_loss_func,
    make_loss_func,
    packed_log_probs_and_entropy,
)
from .digits import DIGITS
from .training import Batch, LossFunc


def policy_loss(batch: Batch) -> LossFunc:
    """Clipped policy gradient."""
    return make_loss_func(
        list(batch["tokens"]),
        _layout(batch["tokens"]),
        PolicyBatch(
            advantages=list(batch["advantages"]),
            loss_masks=list(torch.ones_like(batch["advantages"])),
            old_log_probs=list(batch["log_probs"]),
        ),
        PolicyOptions(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
        recompute=True,
    )


def distillation_loss(batch: Batch) -> LossFunc:
    """Reverse KL divergence from the teachers."""

    def loss_func(
        logits_bsv: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        # The teachers' distributions are on the last pipeline stage only, where this is called.
        loss_of = make_distillation_loss_func(
            _layout(batch["tokens"]),
            DistillationBatch(
                teachers=[batch["teachers"]], loss_masks=[torch.ones(DIGITS)] * len(batch["tokens"])
            ),
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            cp_group=parallel_state.get_context_parallel_group(),
            recompute=True,
        )
        return loss_of(logits_bsv)

    return loss_func


def supervised_loss(batch: Batch) -> LossFunc:
    """Negative log-likelihood of the answers."""

    @checkpointed
    def loss_func(
        logits_bsv: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        layout = _layout(batch["tokens"])
        log_probs, _ = packed_log_probs_and_entropy(
            logits_bsv,
            list(batch["tokens"]),
            layout,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            with_entropy=False,
        )
        log_probs_n = torch.cat(
            layout.gather_responses(log_probs, parallel_state.get_context_parallel_group())
        )
        return -log_probs_n.sum(), torch.tensor(len(log_probs_n), dtype=torch.int32), {}

    return loss_func


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
