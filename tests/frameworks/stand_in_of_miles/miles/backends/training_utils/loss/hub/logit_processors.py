"""In the shape of miles since September 2026: sample by sample, or a kernel over all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .....utils.sampling_mask import RolloutSamplingMask
from ...data.context_parallel import allgather_cp_redistribute, zigzag_pieces
from ...data.sampling_mask import build_local_sampling_mask
from ...parallel import get_parallel_state
from .math_utils import calculate_log_probs_and_entropy


def _iter_response_chunks(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    include_response_indices: bool,
) -> Iterator[tuple[Tensor, Tensor, Sequence[int]]]:
    """Yield logits, tokens and positions in the response of the rows that this rank has of a sample."""
    cp, rows, start = get_parallel_state().cp, logits.squeeze(0), 0
    for tokens, total, response in zip(unconcat_tokens, total_lengths, response_lengths, strict=True):
        if args.allgather_cp or cp.size == 1:
            first = start + total - response - 1 - cp.rank * len(rows)
            low, high = max(-first, 0), max(min(response, len(rows) - first), 0)
            indices, chunk = [*range(low, max(low, high))], rows[first + low : first + max(low, high)]
            start += total
        else:
            pieces, size = zigzag_pieces(total, response), -(-total // (2 * cp.size))
            indices = [index for _, low, high in pieces for index in range(low, high)]
            first = total - response - 1
            chunk = torch.cat(
                [
                    rows[base - begin + first + low : base - begin + first + high]
                    for base, (begin, low, high) in zip((start, start + size), pieces, strict=True)
                ]
            )
            start += 2 * size
        yield chunk, tokens[total - response :][indices], indices if include_response_indices else ()


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
    if args.log_probs_backend == "fused":
        return _kernel(logits, args, unconcat_tokens, **lengths)
    tp, res = get_parallel_state().tp, dict[str, list[Tensor]](log_probs=[])
    has_mask = rollout_sampling_mask is not None
    chunks = _iter_response_chunks(
        logits, args=args, unconcat_tokens=unconcat_tokens, **lengths, include_response_indices=has_mask
    )
    for number, (chunk, tokens, indices) in enumerate(chunks):
        mask = None
        if rollout_sampling_mask is not None:
            mask = build_local_sampling_mask(chunk, rollout_sampling_mask[number], indices, tp_rank=tp.rank)
        log_prob, entropy = calculate_log_probs_and_entropy(
            chunk,
            tokens,
            tp.group,
            with_entropy=with_entropy,
            entropy_requires_grad=entropy_requires_grad,
            chunk_size=args.log_probs_chunk_size,
            true_on_policy=bool(args.true_on_policy_mode),
            vocab_size=args.vocab_size,
            sampling_mask=mask,
            temperature=args.rollout_temperature,
            debug_unified_grad_fused_logprob=bool(args.debug_unified_grad_fused_logprob),
        )
        res["log_probs"].append(log_prob.squeeze(-1))
        if entropy is not None:
            res.setdefault("entropy", []).append(entropy)
    if args.allgather_cp:
        allgather_cp_redistribute(res, logits=logits, args=args, **lengths)
    return res


def _kernel(logits: Tensor, args: Any, tokens: list[Tensor], **lengths: Any) -> dict[str, list[Tensor]]:
    """It reads memory, where deferred logits have none."""
    assert type(logits) is Tensor
    chunks = _iter_response_chunks(
        logits, args=args, unconcat_tokens=tokens, **lengths, include_response_indices=False
    )
    scores: dict[str, list[Tensor]] = {"log_probs": [], "entropy": []}
    for chunk, targets, _ in chunks:
        log_p = (chunk / args.rollout_temperature).log_softmax(-1)
        scores["log_probs"].append(log_p.gather(1, targets[:, None]).squeeze(1))
        scores["entropy"].append(-(log_p.exp() * log_p).sum(-1))
    return scores
