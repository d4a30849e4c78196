"""In the shape of OpenClaw-RL: sample by sample, checkpointed as torch's default has it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime.utils.ppo_utils import calculate_log_probs_and_entropy


def get_responses(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    max_seq_lens: list[int] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    logits = logits.squeeze(0)
    end = 0
    for tokens, total, response in zip(unconcat_tokens, total_lengths, response_lengths, strict=True):
        end += total
        logits_chunk = logits[end - response - 1 : end - 1]
        if args.rollout_temperature != 1.0:
            logits_chunk = logits_chunk.div(args.rollout_temperature)
        yield logits_chunk, tokens[-response:]


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    max_seq_lens: list[int] | None = None,
) -> tuple[Tensor, dict[str, list[Tensor | None]]]:
    res: dict[str, list[Tensor | None]] = {"log_probs": [], "entropy": []}
    for logits_chunk, tokens_chunk in get_responses(
        logits,
        args=args,
        unconcat_tokens=unconcat_tokens,
        total_lengths=total_lengths,
        response_lengths=response_lengths,
    ):
        log_probs, entropy = calculate_log_probs_and_entropy(
            logits_chunk,
            tokens_chunk,
            mpu.get_tensor_model_parallel_group(),
            with_entropy=with_entropy,
            chunk_size=args.log_probs_chunk_size,
        )
        res["log_probs"].append(log_probs.squeeze(-1))
        res["entropy"].append(entropy)
    if not with_entropy:
        del res["entropy"]
    return torch.empty(0), res


def loss_function(
    args: Any, batch: dict[str, Any], num_microbatches: int, logits: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    home, _, name = args.custom_loss_function_path.rpartition(".")
    function = getattr(importlib.import_module(home), name)
    if args.recompute_loss_function:
        loss, log = checkpoint(function, args, batch, logits)
    else:
        loss, log = function(args, batch, logits)
    return loss, torch.tensor(1), {"keys": list(log), "values": torch.tensor([1.0, *log.values()])}
