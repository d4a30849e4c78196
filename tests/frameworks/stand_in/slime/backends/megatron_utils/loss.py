"""In the shape of slime up to v0.3.0: all rows at once, slices of the results."""

from __future__ import annotations

from typing import Any

import torch
from loss_parts import as_megatron_expects, custom_loss
from megatron.core import parallel_state as mpu
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...utils.ppo_utils import calculate_log_probs_and_entropy


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    logits = logits.squeeze(0)
    if args.rollout_temperature != 1.0:
        logits = logits / args.rollout_temperature
    tokens = torch.cat([tokens.roll(-1) for tokens in unconcat_tokens])
    log_probs, entropies = calculate_log_probs_and_entropy(
        logits,
        tokens,
        mpu.get_tensor_model_parallel_group(),
        with_entropy=with_entropy,
        chunk_size=args.log_probs_chunk_size,
        need_entropy_grad=with_entropy and args.entropy_coef != 0,
    )
    spans, end = [], 0
    for total, response in zip(total_lengths, response_lengths, strict=True):
        end += total
        spans.append(slice(end - response - 1, end - 1))
    res = {"log_probs": [log_probs.squeeze(-1)[span] for span in spans]}
    if entropies is not None:
        res["entropy"] = [entropies[span] for span in spans]
    return torch.empty(0), res


def loss_function(
    args: Any, batch: dict[str, Any], num_microbatches: int, logits: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    function = custom_loss(args)
    if args.recompute_loss_function:
        loss, log = checkpoint(function, args, batch, logits, use_reentrant=False)
    else:
        loss, log = function(args, batch, logits)
    return as_megatron_expects(loss, log)
