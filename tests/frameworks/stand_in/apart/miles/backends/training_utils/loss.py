"""In the shape of miles: checkpointed as torch's default has it, with a copy of the scoring function."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from loss_parts import Reduction, as_megatron_expects, sum_of_sample_mean_of, what_is_scored
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .loss_hub.logit_processors import get_log_probs_and_entropy
from .loss_hub.math_utils import compute_policy_loss


def policy_loss_function(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Reduction
) -> tuple[Tensor, dict[str, Tensor]]:
    scores = get_log_probs_and_entropy(logits, args=args, with_entropy=True, **what_is_scored(batch))
    ppo_kl = torch.cat(batch["log_probs"]) - torch.cat(scores["log_probs"])
    pg_loss = compute_policy_loss(ppo_kl, torch.cat(batch["advantages"]), args.eps_clip, args.eps_clip_high)
    entropy = sum_of_sample_mean(torch.cat(scores["entropy"]))
    loss = sum_of_sample_mean(pg_loss) - args.entropy_coef * entropy
    return loss, {"loss": loss.detach(), "entropy_loss": entropy.detach()}


def loss_function(
    args: Any, batch: dict[str, Any], num_microbatches: int, logits: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    function = partial(policy_loss_function, sum_of_sample_mean=sum_of_sample_mean_of(batch))
    if args.recompute_loss_function:
        loss, log = checkpoint(function, args, batch, logits)
    else:
        loss, log = function(args, batch, logits)
    return as_megatron_expects(loss, log)
