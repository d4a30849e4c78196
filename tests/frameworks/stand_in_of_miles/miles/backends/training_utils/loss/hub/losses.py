"""In the shape of miles since September 2026: masked tokens become zeros behind their exponentials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp
from torch import Tensor

from .logit_processors import get_log_probs_and_entropy
from .math_utils import compute_approx_kl, compute_policy_loss

Reduction = Callable[[Tensor], Tensor]


def policy_loss_function(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Reduction
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
    lengths = batch["total_lengths"], batch["response_lengths"]
    active = torch.cat([*map(slice_log_prob_with_cp, batch["loss_masks"], *lengths)]).bool()

    def finite(values: Tensor) -> Tensor:
        return torch.where(active, torch.nan_to_num(values, 0.0, 0.0, 0.0), values.new_zeros(()))

    ppo_kl, advantages = finite(old - log_probs), finite(torch.cat(batch["advantages"]))
    pg_loss, _ = compute_policy_loss(ppo_kl, advantages, args.eps_clip, args.eps_clip_high)
    entropy = sum_of_sample_mean(torch.cat(scores["entropy"]))
    loss = sum_of_sample_mean(pg_loss) - args.entropy_coef * entropy
    log = {"entropy_loss": entropy.detach(), "ppo_kl": sum_of_sample_mean(ppo_kl).detach()}
    if args.use_kl_loss:
        ratio = torch.exp(log_probs - old) if args.use_unbiased_kl else None
        kl = compute_approx_kl(log_probs, torch.cat(batch["ref_log_probs"]), args.kl_loss_type, ratio)
        log["kl_loss"] = sum_of_sample_mean(finite(kl))
        loss = loss + args.kl_loss_coef * log["kl_loss"] if args.kl_loss_coef else loss
        log["kl_loss"] = log["kl_loss"].detach()
    return loss, {"loss": loss.detach(), **log}


def value_loss_function(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Reduction
) -> tuple[Tensor, dict[str, Tensor]]:
    samples = zip(logits[0, :, 0].split(batch["total_lengths"]), batch["response_lengths"], strict=True)
    values = torch.cat([whole[-response - 1 : -1] for whole, response in samples])
    loss = sum_of_sample_mean((values - torch.cat(batch["returns"])) ** 2)
    return loss, {"value_loss": loss.detach()}
