"""Log-probs and entropies of the responses of a microbatch, straight from the logits of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import InvalidInputError
from .sequence_layout import SequenceLayout
from .vocab_parallel import vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy


def packed_log_probs_and_entropy(
    logits: torch.Tensor,
    tokens: Sequence[torch.Tensor],
    layout: SequenceLayout,
    *,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    with_entropy: bool = True,
    entropy_grad: bool = True,
    keep_mask: torch.Tensor | None = None,
    inplace_backward: bool = False,
    block_bytes: int | None = None,
    fused: bool | str = "auto",
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Log-probs, and entropies if wanted, of the response tokens of this CP rank, one tensor per sample.

    Rows of prompts and padding are not read; their gradient is zero. The one collective is that of the
    forward over ``tp_group``. CP ranks without a response token take part like the others, and what they
    return is empty and requires grad as it does there.

    Args:
        logits: all rows of this CP rank, as the model returns them: ``[1, rows, vocab / tp]`` or
            ``[rows, vocab / tp]`` (packed), ``[batch, seq, vocab / tp]`` (padded).
        tokens: whole samples, ``[total_length]`` each, the same on every rank.
        layout: that of this microbatch on this CP rank.
        with_entropy: entropies, too.
        keep_mask: bool ``[n, vocab / tp]``, for the ``n`` tokens of ``layout.response_rows``.

    The other arguments are those of :func:`vocab_parallel_log_probs_and_entropy`.

    Returns:
        Log-probs, and entropies or ``None``: ``[layout.local_lengths[i]]`` for sample ``i``. Full responses
        are made of them by :meth:`SequenceLayout.gather_responses`.

    Raises:
        InvalidInputError: logits, tokens and layout are not of one microbatch, or not on one device.
    """
    logits_tv = rows_of(logits, layout)
    options: dict[str, Any] = {
        "tp_group": tp_group,
        "rows": layout.response_rows,
        "temperature": temperature,
        "keep_mask": keep_mask,
        "inplace_backward": inplace_backward,
        "block_bytes": block_bytes,
        "fused": fused,
    }
    targets = layout.response_targets(tokens)
    if not with_entropy:
        log_probs = vocab_parallel_log_probs(logits_tv, targets, **options)
        return layout.split_responses(log_probs), None
    log_probs, entropies = vocab_parallel_log_probs_and_entropy(
        logits_tv, targets, entropy_grad=entropy_grad, **options
    )
    return layout.split_responses(log_probs), layout.split_responses(entropies)


def rows_of(logits: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
    """Logits as the model returns them, ``[rows, vocab / tp]``, if they are of this layout."""
    if tuple(logits.shape[:-1]) not in (layout.logits_shape, (layout.num_rows,)):
        raise InvalidInputError(
            f"logits are {list(logits.shape)}, but their layout is {list(layout.logits_shape)} without the "
            "vocabulary: give [batch, seq, vocab] of the lengths that it was built for (of packed samples "
            "padded at the end, num_rows=logits.shape[1])"
        )
    if logits.device != layout.response_rows.device:
        raise InvalidInputError(
            f"logits are on {logits.device}, their layout on {layout.response_rows.device}; "
            "give device=logits.device to SequenceLayout.build"
        )
    return logits.flatten(0, -2)
