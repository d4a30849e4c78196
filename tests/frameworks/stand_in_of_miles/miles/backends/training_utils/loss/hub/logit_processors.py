"""In the shape of miles since September 2026: sample by sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp
from torch import Tensor

from .....utils.sampling_mask import RolloutSamplingMask
from ...data.context_parallel import allgather_cp_redistribute
from ...parallel import get_parallel_state
from .math_utils import calculate_log_probs_and_entropy


def _iter_response_chunks(
    logits: Tensor, *, args: Any, total_lengths: list[int], response_lengths: list[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits, and their positions in the response, of the rows that this rank has of a sample."""
    cp, rows, start = get_parallel_state().cp, logits.squeeze(0), 0
    for total, response in zip(total_lengths, response_lengths, strict=True):
        indices, first = torch.arange(response), total - response - 1
        if args.allgather_cp or cp.size == 1:
            local = start + first + indices - cp.rank * len(rows)
            is_here = (local >= 0) & (local < len(rows))
            yield rows[local[is_here]], indices[is_here]
            start += total
        else:
            size, indices = -(-total // (2 * cp.size)), slice_log_prob_with_cp(indices, total, response)
            chunk, offset = (first + indices) // size, (first + indices) % size
            yield rows[start + offset + torch.where(chunk == cp.rank, 0, size)], indices
            start += 2 * size


def _local_mask(logits: Tensor, sampled: RolloutSamplingMask, indices: Tensor) -> Tensor:
    """Return a mask over this rank's rows and columns."""
    mask, first = torch.zeros(logits.shape, dtype=torch.bool), get_parallel_state().tp.rank * logits.size(-1)
    for row, index in enumerate(indices.tolist()):
        columns = sampled.of_token(index) - first
        mask[row, columns[(columns >= 0) & (columns < logits.size(-1))]] = True
    return mask


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
    max_seq_lens: list[int] | None = None,
    rollout_sampling_mask: Sequence[RolloutSamplingMask] | None = None,
) -> dict[str, list[Tensor]]:
    lengths = {"total_lengths": total_lengths, "response_lengths": response_lengths}
    res = dict[str, list[Tensor]](log_probs=[])
    for number, (chunk, indices) in enumerate(_iter_response_chunks(logits, args=args, **lengths)):
        sampled = rollout_sampling_mask and rollout_sampling_mask[number]
        log_prob, entropy = calculate_log_probs_and_entropy(
            chunk,
            unconcat_tokens[number][total_lengths[number] - response_lengths[number] :][indices],
            get_parallel_state().tp.group,
            with_entropy=with_entropy,
            entropy_requires_grad=entropy_requires_grad,
            chunk_size=args.log_probs_chunk_size,
            true_on_policy=bool(args.true_on_policy_mode),
            vocab_size=args.vocab_size,
            sampling_mask=_local_mask(chunk, sampled, indices) if sampled else None,
            temperature=args.rollout_temperature,
            debug_unified_grad_fused_logprob=bool(args.debug_unified_grad_fused_logprob),
        )
        res["log_probs"].append(log_prob.squeeze(-1))
        if entropy is not None:
            res.setdefault("entropy", []).append(entropy)
    if args.allgather_cp:
        allgather_cp_redistribute(res, logits=logits, args=args, **lengths)
    return res
