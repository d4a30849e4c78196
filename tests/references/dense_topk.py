"""What log-probabilities at given ids and of the tail must equal, in float64 over the whole vocabulary."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rl_patches.losses.vocab.arguments import Rows

NO_ENTRY = -100


def has_no_softmax(logits: Tensor) -> Tensor:
    """The rows without a softmax: with NaN or +inf in them, or nothing but -inf."""
    return ~(logits < math.inf).all(1) | (logits == -math.inf).all(1)


def dense_log_probs_at(
    logits: Tensor,
    indices: Tensor,
    rows: Rows = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities at ids, -100 for none, and of all others together; in float64, differentiable.

    Written so that nothing is lost in logits of 1e30 either: the tail's value is a difference of log-sum-exps
    relative to the row's largest logit, and its gradient one of two softmaxes.
    """
    z = selected(logits.double(), rows)[:, :vocab_size] / temperature
    without_softmax, none = has_no_softmax(z), indices < 0
    z = z + torch.where(without_softmax, math.nan, 0.0)[:, None]
    log_probs = z.log_softmax(1).gather(1, indices.clamp(min=0)).masked_fill(none, -math.inf)
    # The last column is for no id.
    inside = torch.zeros(len(z), z.shape[1] + 1, dtype=torch.bool, device=z.device)
    inside.scatter_(1, torch.where(none, z.shape[1], indices), True)
    others = z.masked_fill(inside[:, :-1], -math.inf)
    empty = (others == -math.inf).all(1) & ~without_softmax
    others = torch.where(empty[:, None], 0.0, others)
    top, top_of_others = (x.detach().amax(1, keepdim=True) for x in (z, others))
    total = (z - top).logsumexp(1)
    value = (others - top).logsumexp(1) - total
    slope = (others - top_of_others).logsumexp(1) - total
    return log_probs, torch.where(empty, -math.inf, value.detach() + (slope - slope.detach()))


def selected(logits: Tensor, rows: Rows) -> Tensor:
    if rows is None or isinstance(rows, (Tensor, slice)):
        return logits if rows is None else logits[rows]
    return torch.cat([logits[run] for run in rows])


def random_indices(rows: int, columns: int, k: int, seed: int = 3) -> Tensor:
    """With an id twice and thrice, first and last columns, missing entries, and a row of those alone."""
    indices = torch.randint(columns, (rows, k), generator=torch.Generator().manual_seed(seed))
    indices[::3, -1] = indices[::3, 0]
    indices[1::4, :3] = columns - 1
    indices[2::4, 1] = 0
    indices[3::5, k // 2] = NO_ENTRY
    indices[rows // 2] = NO_ENTRY
    return indices
