"""In the shape of miles since September 2026: checkpointed as torch's default has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .hub.logit_processors import get_log_probs_and_entropy
from .hub.math_utils import compute_policy_loss


def policy_loss_function(
    args: Any, batch: dict[str, Any], logits: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    scores = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
        entropy_requires_grad=args.entropy_coef != 0,
        rollout_sampling_mask=batch.get("rollout_sampling_mask"),
    )
    log_probs, old = torch.cat(scores["log_probs"]), torch.cat(batch["log_probs"])
    pg_loss, _ = compute_policy_loss(
        old - log_probs, torch.cat(batch["advantages"]), args.eps_clip, args.eps_clip_high
    )
    entropy = torch.cat(scores["entropy"]).sum()
    loss = pg_loss.sum() - args.entropy_coef * entropy
    return loss, {"loss": loss.detach(), "entropy_loss": entropy.detach()}


def loss_function(
    args: Any, batch: dict[str, Any], num_microbatches: int, logits: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    if args.recompute_loss_function:
        loss, log = checkpoint(policy_loss_function, args, batch, logits)
    else:
        loss, log = policy_loss_function(args, batch, logits)
    return loss, torch.tensor(1), {"keys": list(log), "values": torch.tensor([1.0, *log.values()])}
