"""The k most probable tokens of logits split over the vocabulary, and log-probabilities of given tokens.

For logits ``x`` of a row, a temperature ``T`` and ids ``S``, with ``p = softmax(x / T)``::

    log_prob of id   = log p[id]                   d / dx = (onehot(id) - p) / T
    tail_log_prob    = log(sum of p outside S)     d / dx = (p / tail outside S - p) / T

The tail is summed over the vocabulary, in the same pass: ``log(1 - sum of p in S)`` has no digit left in
float32 once the tail is 1e-7. Tensor parallel ranks exchange what belongs to k ids once, and never the
vocabulary; backward needs no collective, since a rank's gradient is the whole derivative by its own logits.

Elsewhere: slime#2033 gathers the vocabulary to select, and sums log-probs with a collective that has no
backward (right at TP 1 only); NeMo-RL has no tail; OpenClaw-RL computes a cross entropy for each of k ids.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from .arguments import checked_source, valid_indices
from .distributions import NO_ENTRY, TopKDistribution
from .options import VocabParallelOptions, check_integer
from .topk_autograd import LogProbsAt, topk


@torch.no_grad()
def vocab_parallel_topk(
    logits: Tensor,
    k: int,
    *,
    tp_group: dist.ProcessGroup | None = None,
    rows: Tensor | slice | None = None,
    temperature: float = 1.0,
    block_bytes: int | None = None,
) -> TopKDistribution:
    """Return the k most probable tokens of each selected row, in descending order; ties go to the lowest ids.

    One all-gather over ``tp_group``: two numbers per candidate and two for the tail, ``8 * k + 8`` bytes per
    row and rank in float32. No autograd graph.

    Args:
        logits: ``[T, V / tp]``; ``tp_group``, ``rows``, ``temperature`` and ``block_bytes`` too are those of
            :func:`vocab_parallel_log_probs`.
        k: number of tokens, from 1 to ``V``.

    Returns:
        The distributions of ``n`` tokens, in float32 (float64 for float64 logits), the same bits on all ranks
        of ``tp_group``. A row with NaN or +inf has any ids, each once, and NaN for all log-probabilities.

    Raises:
        InvalidInputError: arguments do not fit; raised on every rank alike and before the collective.
    """
    options = VocabParallelOptions(tp_group=tp_group, temperature=temperature, block_bytes=block_bytes)
    source, options = checked_source(logits, rows, None, options)
    vocab_size = source.width * options.tp_size
    expected = f"from 1 to {vocab_size}, the size of the vocabulary"
    k = check_integer("k", k, 1, expected, highest=vocab_size)
    return TopKDistribution(*topk(source, k, options))


@overload
def vocab_parallel_log_probs_at(
    logits: Tensor,
    indices: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    rows: Tensor | slice | None = None,
    temperature: float = 1.0,
    with_tail: Literal[False] = False,
    inplace_backward: bool = False,
    block_bytes: int | None = None,
) -> Tensor: ...


@overload
def vocab_parallel_log_probs_at(
    logits: Tensor,
    indices: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    rows: Tensor | slice | None = None,
    temperature: float = 1.0,
    with_tail: Literal[True],
    inplace_backward: bool = False,
    block_bytes: int | None = None,
) -> tuple[Tensor, Tensor]: ...


def vocab_parallel_log_probs_at(
    logits: Tensor,
    indices: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    rows: Tensor | slice | None = None,
    temperature: float = 1.0,
    with_tail: bool = False,
    inplace_backward: bool = False,
    block_bytes: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return log-probabilities of given tokens of each selected row, and of all others together.

    The result is differentiable.
    For backward it keeps the logits themselves, the ids and a few numbers per row. Backward allocates the
    gradient and a block of rows, or with ``inplace_backward`` the block alone, whatever ``K`` is.

    Args:
        logits: ``[T, V / tp]``; ``tp_group``, ``rows``, ``temperature``, ``inplace_backward`` and
            ``block_bytes`` too are those of :func:`vocab_parallel_log_probs`.
        indices: token ids ``[n, K]`` in the whole vocabulary, of the selected rows, the same on all ranks. An
            id may occur twice in a row; its probability counts once. -100 is no id at all, so that rows of
            fewer can be filled up: log-probability -inf and no gradient.
        with_tail: also return the log-probability of the vocabulary without the ids. In float32 its relative
            error is below 5e-6, however small the tail is.

    Returns:
        ``[n, K]``, or this and ``[n]``, in float32 (float64 for float64 logits), the same bits on all ranks
        of ``tp_group``. A tail without any token is -inf and has no gradient. NaN and +inf make NaN of their
        row, its tail included.

    Raises:
        InvalidInputError: arguments do not fit; raised on every rank alike and before the one collective (an
            all-reduce of ``K + 2 * tp`` numbers per row), except that refusals of ``inplace_backward`` travel
            with it, see :func:`vocab_parallel_log_probs`. On a GPU the *values* of ``indices`` and ``rows``
            are checked by the device. In backward: the logits were overwritten since forward.
    """
    options = VocabParallelOptions(
        tp_group=tp_group,
        temperature=temperature,
        inplace_backward=inplace_backward,
        block_bytes=block_bytes,
        ignore_index=NO_ENTRY,
    )
    source, options = checked_source(logits, rows, None, options)
    indices = valid_indices(indices, source, options)
    log_probs, tail_log_prob = LogProbsAt.apply(  # type: ignore[no-untyped-call]
        source, indices, options, source.claim(), *source.inputs
    )
    return (log_probs, tail_log_prob) if with_tail else log_probs
