"""What the vocabulary-parallel losses must equal: the formulas over the whole vocabulary, in float64."""

import math

import torch
from torch import Tensor

from megatron_rl_patches.losses.vocab.arguments import Rows

IGNORE = -100


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def buckets(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Return log-probabilities ``[n, k + 1]`` of the ids, and of all others together."""
    others = log_probs.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([log_probs.gather(1, ids), others], 1)


def dense_log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    rows: Rows = None,
    temperature: float = 1.0,
    keep_mask: Tensor | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Differentiable; ``p * log p`` is 0 where ``p`` is. The columns from ``vocab_size`` on do not exist."""
    z = selected(logits.double(), rows)[:, :vocab_size]
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
    indices[3::5, k // 2] = IGNORE
    indices[rows // 2] = IGNORE
    return indices
