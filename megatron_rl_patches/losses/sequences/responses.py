"""Log-probs and entropies of the responses of a microbatch, computed from the logits of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import InvalidInputError
from ..logits.log_probs import vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy
from .layout import SequenceLayout


def packed_log_probs_and_entropy(
    logits: torch.Tensor,
    tokens: Sequence[torch.Tensor],
    layout: SequenceLayout,
    *,
    with_entropy: bool = True,
    entropy_grad: bool = True,
    **options: Any,
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Return log-probs and entropies of the response tokens of this CP rank, one tensor per sample.

    Rows of prompts and padding are not read; their gradient is zero. The only collective is the all-gather of
    the forward pass over ``tp_group``.

    Args:
        logits: as the model returns them on this CP rank: ``[1, rows, vocab / tp]`` or ``[rows, vocab / tp]``
            (packed), ``[batch, seq, vocab / tp]`` (padded).
        tokens: whole samples, ``[total_length]`` each, the same on every rank.
        layout: layout of this microbatch on this CP rank.
        with_entropy: compute entropies too.
        entropy_grad: let the entropies require grad; ``False`` saves time in backward.
        **options: ``tp_group``, ``temperature``, ``keep_mask`` (for the rows ``layout.response_rows``),
            ``inplace_backward``, ``block_bytes`` and ``fused`` of :func:`vocab_parallel_log_probs`.

    Returns:
        The log-probs, and the entropies in nats or ``None``: for sample ``i`` a tensor
        ``[layout.local_lengths[i]]`` in float32 (float64 for float64 logits).

    Raises:
        InvalidInputError: logits, tokens and layout are not of the same microbatch, or not on one device.
    """
    logits_and_targets = rows_of(logits, layout), layout.response_targets(tokens)
    rows, split = layout.response_rows, layout.split_responses
    if not with_entropy:
        return split(vocab_parallel_log_probs(*logits_and_targets, rows=rows, **options)), None
    log_probs, entropies = vocab_parallel_log_probs_and_entropy(
        *logits_and_targets, rows=rows, entropy_grad=entropy_grad, **options
    )
    return split(log_probs), split(entropies)


def rows_of(logits: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
    """Return the model's logits as ``[rows, vocab / tp]``, if shape and device are those of the layout."""
    if tuple(logits.shape[:-1]) not in (layout.logits_shape, (layout.num_rows,)):
        raise InvalidInputError(
            f"logits are {list(logits.shape)}, but their layout is {list(layout.logits_shape)} without the "
            "vocabulary: pass [batch, seq, vocab] of the lengths that it was built for (of packed samples "
            "padded at the end, num_rows=logits.shape[1])"
        )
    if logits.device != layout.response_rows.device:
        raise InvalidInputError(
            f"logits are on {logits.device}, their layout on {layout.response_rows.device}; "
            "pass device=logits.device to SequenceLayout.build"
        )
    return logits.flatten(0, -2)
