"""In the shape of miles since September 2026: checkpointed as torch's default has it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .hub.losses import policy_loss_function, value_loss_function


def loss_function(
    args: Any, batch: dict[str, Any], num_microbatches: int, logits: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    lengths = batch["total_lengths"], batch["response_lengths"]
    masks = [*map(slice_log_prob_with_cp, batch["loss_masks"], *lengths)]

    def sum_of_sample_mean(x: Tensor) -> Tensor:
        parts = zip(x.split([*map(len, masks)]), masks, batch["rollout_mask_sums"], strict=True)
        return torch.stack([(part * mask).sum() / n.clamp(min=1) for part, mask, n in parts]).sum()

    own = policy_loss_function if args.loss_type == "policy_loss" else value_loss_function
    function = partial(own, sum_of_sample_mean=sum_of_sample_mean)
    if args.recompute_loss_function:
        loss, log = checkpoint(function, args, batch, logits)
    else:
        loss, log = function(args, batch, logits)
    return loss, torch.tensor(1), {"keys": list(log), "values": torch.tensor([1.0, *log.values()])}
