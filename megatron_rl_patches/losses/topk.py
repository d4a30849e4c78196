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

from ..errors import InvalidInputError
from ._inputs import checked_indices, checked_shard, position_in
from ._ownership import lend, refuse_overwritten
from ._topk_function import LogProbsAt, Options, topk
from .topk_distribution import NO_ENTRY, TopKDistribution


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
    """The k most probable tokens of each selected row, from the most probable on; of equals the lowest ids.

    One all-gather over ``tp_group``: two numbers per candidate and two for the tail, ``8 * k + 8`` bytes per
    row and rank in float32. No autograd graph.

    Args:
        logits: ``[T, V / tp]``; ``tp_group``, ``rows``, ``temperature`` and ``block_bytes`` too are those of
            :func:`vocab_parallel_log_probs`.
        k: how many, from 1 to ``V``.

    Returns:
        Of ``n`` tokens, in float32 (float64 for float64 logits), the same bits on all ranks of ``tp_group``.
        Of a row with NaN or +inf the ids are some, each once, and all log-probabilities NaN.

    Raises:
        InvalidInputError: arguments that do not fit, on every rank alike and before the collective.
    """
    _, tp_size = position_in(tp_group)
    shard = checked_shard(logits, rows, None, temperature, block_bytes)
    vocab_size = logits.shape[1] * tp_size
    if not 1 <= k <= vocab_size:
        raise InvalidInputError(f"k is {k}, expected from 1 to {vocab_size}, the size of the vocabulary")
    refuse_overwritten(logits)
    return TopKDistribution(*topk(shard, k, tp_group))


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
    """Log-probabilities of given tokens of each selected row, and of all others together; differentiable.

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
        of ``tp_group``. A tail without any token is -inf and has no gradient. NaN and +inf spoil their row as
        in :func:`vocab_parallel_log_probs`, this tail included.

    Raises:
        InvalidInputError: arguments that do not fit, on every rank alike and before the one collective (an
            all-reduce of ``K + 2 * tp`` numbers per row). On a GPU the *values* of ``indices`` and ``rows``
            are checked by the device. In backward: the logits were overwritten since forward.
    """
    tp_rank, tp_size = position_in(tp_group)
    shard = checked_shard(logits, rows, None, temperature, block_bytes)
    indices = checked_indices(indices, shard, logits.shape[1] * tp_size, NO_ENTRY)
    refuse_overwritten(logits)
    needs_grad = torch.is_grad_enabled() and logits.requires_grad
    loan = lend(logits) if inplace_backward and needs_grad else None
    log_probs, tail_log_prob = LogProbsAt.apply(  # type: ignore[no-untyped-call]
        logits, shard, indices, Options(tp_group, tp_rank, loan)
    )
    return (log_probs, tail_log_prob) if with_tail else log_probs
