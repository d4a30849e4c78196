"""What the vocabulary-parallel losses must equal: the formulas over the whole vocabulary, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

IGNORE = -100


def dense_log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    rows: Tensor | slice | None = None,
    temperature: float = 1.0,
    keep_mask: Tensor | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Differentiable; ``p * log p`` is 0 where ``p`` is. The columns from ``vocab_size`` on do not exist."""
    z = (logits.double() if rows is None else logits.double()[rows])[:, :vocab_size]
    counts, column = targets != IGNORE, targets.clamp(min=0)[:, None]
    z = torch.where(counts[:, None], z / temperature, 0.0)
    kept = z
    if keep_mask is not None:
        kept = z.masked_fill(~keep_mask[:, :vocab_size].scatter(1, column, True), float("-inf"))
    log_prob = torch.log_softmax(kept, 1).gather(1, column).squeeze(1)
    log_p = torch.log_softmax(z, 1)
    log_p = torch.where(log_p < -700, -700.0, log_p)  # not 0 * inf
    entropy = -(log_p.exp() * log_p).sum(1)
    return torch.where(counts, log_prob, 0.0), torch.where(counts, entropy, 0.0)


def dense_divergence(
    name: str, log_p: Tensor, log_q: Tensor, log_old: Tensor | None = None, beta: float = 0.3
) -> Tensor:
    """Return a divergence of the student's ``log_p``; over all ids ``generalized_kl`` is ``reverse_kl``.

    Log-probabilities below -10,000 count as a constant of -10,000.
    """
    log_p, log_q = log_p.clamp(min=-1e4), log_q.clamp(min=-1e4)
    p, q = log_p.exp(), log_q.exp()
    if name in ("reverse_kl", "generalized_kl"):
        return (p * (log_p - log_q)).sum(1)
    if name == "importance_weighted_reverse_kl":
        assert log_old is not None
        return (p * (log_old.clamp(min=-1e4) - log_q)).sum(1)
    if name == "forward_kl":
        return (q * (log_q - log_p)).sum(1)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log(1 - beta))
    to_middle = {
        "skewed_forward_kl": (q * (log_q - log_m)).sum(1),
        "skewed_reverse_kl": (p * (log_p - log_m)).sum(1),
    }
    if name == "jensen_shannon":
        return beta * to_middle["skewed_forward_kl"] + (1 - beta) * to_middle["skewed_reverse_kl"]
    return to_middle[name]


def relative_error(found: Tensor, expected: Tensor, scale: Tensor) -> float:
    error = ((found.double() - expected).abs() / scale.clamp(min=1e-6)).detach()
    return error.max().item() if error.numel() else 0.0
