"""In the shape of miles: sample by sample; it returns the dict alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from ..cp_utils import allgather_cp_redistribute
from .math_utils import calculate_log_probs_and_entropy


def get_responses(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
) -> Iterator[tuple[Tensor, Tensor]]:
    assert logits.dtype in (torch.float32, torch.bfloat16)
    logits = logits.squeeze(0)
    if args.rollout_temperature > 0 and args.rollout_temperature != 1.0:
        logits = logits.div(args.rollout_temperature)
    end = -parallel_state.get_context_parallel_rank() * logits.size(0) if args.allgather_cp else 0
    for tokens, total, response in zip(unconcat_tokens, total_lengths, response_lengths, strict=True):
        end += total
        begin, stop = max(end - response - 1, 0), min(max(end - 1, 0), logits.size(0))
        logits_chunk = logits[begin : max(begin, stop)]
        skipped = begin - (end - response - 1)
        yield logits_chunk, tokens[total - response + skipped :][: logits_chunk.size(0)]


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    with_entropy: bool = False,
    entropy_requires_grad: bool = True,
    non_loss_data: bool = True,
) -> dict[str, list[Tensor]]:
    res: dict[str, list[Any]] = {"log_probs": [], "entropy": []}
    lengths = {"total_lengths": total_lengths, "response_lengths": response_lengths}
    for logits_chunk, tokens_chunk in get_responses(
        logits, args=args, unconcat_tokens=unconcat_tokens, **lengths
    ):
        log_probs, entropy = calculate_log_probs_and_entropy(
            logits_chunk,
            tokens_chunk,
            parallel_state.get_tensor_model_parallel_group(),
            with_entropy=with_entropy,
            entropy_requires_grad=entropy_requires_grad,
            chunk_size=args.log_probs_chunk_size,
            true_on_policy=args.true_on_policy_mode,
        )
        res["log_probs"].append(log_probs.squeeze(-1))
        res["entropy"].append(entropy)
    if not with_entropy:
        del res["entropy"]
    if args.allgather_cp:
        allgather_cp_redistribute(res, logits=logits, args=args, **lengths)
    return res
