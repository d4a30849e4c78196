"""In the shape of slime between v0.2.4 and v0.3.0: all rows at once, slices of the results.

Its redistribution gives a rank without tokens a placeholder that requires grad, also where the other ranks'
values do not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.nn
from loss_parts import as_megatron_expects, custom_loss, whole_responses
from megatron.core import parallel_state as mpu
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...utils.ppo_utils import calculate_log_probs_and_entropy
from .cp_utils import slice_log_prob_with_cp


def _allgather_cp_redistribute(
    res: dict[str, list[Tensor]],
    *,
    logits_local_len: int,
    args: Any,
    total_lengths: list[int],
    response_lengths: list[int],
) -> None:
    first = mpu.get_context_parallel_rank() * logits_local_len
    placeholder = torch.zeros(0, requires_grad=True)
    for key, values in res.items():
        whole = whole_responses(values, placeholder, first, total_lengths, response_lengths)
        gathered = torch.distributed.nn.all_reduce(whole, group=mpu.get_context_parallel_group())
        lengths = zip(gathered.split(response_lengths), total_lengths, response_lengths, strict=True)
        res[key] = [slice_log_prob_with_cp(*sample) for sample in lengths]


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
    first = mpu.get_context_parallel_rank() * len(logits)
    tokens = torch.cat([tokens.roll(-1) for tokens in unconcat_tokens])[first : first + len(logits)]
    log_probs, entropies = calculate_log_probs_and_entropy(
        logits,
        tokens,
        mpu.get_tensor_model_parallel_group(),
        with_entropy=with_entropy,
        chunk_size=args.log_probs_chunk_size,
        need_entropy_grad=with_entropy and args.entropy_coef != 0,
    )
    spans, start = [], -first
    for total, response in zip(total_lengths, response_lengths, strict=True):
        start += total
        spans.append(slice(max(start - response - 1, 0), max(start - 1, 0)))
    res = {"log_probs": [log_probs.squeeze(-1)[span] for span in spans]}
    if entropies is not None:
        res["entropy"] = [entropies[span] for span in spans]
    if args.allgather_cp:
        _allgather_cp_redistribute(
            res,
            logits_local_len=len(logits),
            args=args,
            total_lengths=total_lengths,
            response_lengths=response_lengths,
        )
    return torch.empty(0), res


def loss_function(
    args: Any, batch: dict[str, Any], num_microbatches: int, logits: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    function = custom_loss(args)
    if args.recompute_loss_function:
        loss, log = checkpoint(function, args, batch, logits, use_reentrant=False)
    else:
        loss, log = function(args, batch, logits)
    return as_megatron_expects(args, logits, loss, log)
