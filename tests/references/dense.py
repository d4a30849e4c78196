"""What the vocabulary-parallel losses must equal: the formulas over the whole vocabulary, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl_patches.losses import vocab_parallel_log_probs_and_entropy

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


class Errors(NamedTuple):
    """Relative to each value; of gradients, to the largest of the row. What is below 1e-6 counts as 1e-6."""

    log_prob: float
    entropy: float
    gradient: float


def errors(
    logits: Tensor,
    targets: Tensor,
    *,
    entropy_grad: bool = True,
    inplace_backward: bool = False,
    columns: slice = slice(None),
    keep_mask: Tensor | None = None,
    **options: Any,
) -> Errors:
    """What the loss makes of the whole ``logits``, each value and its gradient weighted differently.

    ``columns`` are those of this rank; a keep-mask is given whole, too.
    """
    row_options = {name: options[name] for name in ("rows", "temperature", "vocab_size") if name in options}
    weights = torch.linspace(-1.0, 2.0, 2 * len(targets), dtype=torch.float64).view(2, -1)
    if not entropy_grad:
        weights[1] = 0.0

    options |= {"entropy_grad": entropy_grad, "inplace_backward": inplace_backward}
    options["keep_mask"] = None if keep_mask is None else keep_mask[:, columns]

    def found(mine: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, entropies = vocab_parallel_log_probs_and_entropy(mine, targets, **options)
        assert entropies.requires_grad == entropy_grad
        return log_probs, entropies

    expected = partial(dense_log_probs_and_entropy, targets=targets, keep_mask=keep_mask, **row_options)
    return Errors(*differences(logits, found, expected, weights, inplace_backward, columns))


def differences(
    logits: Tensor,
    found: Callable[[Tensor], Sequence[Tensor]],
    expected: Callable[[Tensor], Sequence[Tensor]],
    weights: Sequence[Tensor] | Tensor,
    inplace_backward: bool,
    columns: slice,
) -> list[float]:
    """The relative errors of each result, and of the gradient of their weighted sum; -inf counts for none.

    ``found`` gets the columns of this rank, ``expected`` all of them in float64. Columns of NaN without a
    gradient are padding.
    """
    leaf, weights = logits.detach().double().requires_grad_(), [w.to(logits.device) for w in weights]
    references = expected(leaf)
    finite = [values > float("-inf") for values in references]

    def weighted(results: Sequence[Tensor]) -> Tensor:
        terms = zip(results, weights, finite, strict=True)
        return torch.stack(
            [(torch.where(ok, x, 0.0).double() * w).sum() for x, w, ok in terms if x.requires_grad]
        ).sum()

    weighted(references).backward()  # type: ignore[no-untyped-call]
    mine = logits[:, columns].detach().clone().requires_grad_()
    results = found(mine * 1 if inplace_backward else mine)
    weighted(results).backward()  # type: ignore[no-untyped-call]
    for values, ok in zip(results, finite, strict=True):
        assert values.dtype == (mine.dtype if mine.dtype == torch.float64 else torch.float32)
        assert (values[~ok] == float("-inf")).all()
    assert mine.grad is not None and leaf.grad is not None
    assert mine.grad.dtype == mine.dtype
    padding = logits.isnan().all(0) & (leaf.grad == 0).all(0)
    assert not mine.grad[:, padding[columns]].any()
    triples = zip(results, references, finite, strict=True)
    of_values = [relative_error(x[ok], reference[ok], reference[ok].abs()) for x, reference, ok in triples]
    of_row = leaf.grad.abs().amax(1, keepdim=True)
    return [*of_values, relative_error(mine.grad, leaf.grad[:, columns], of_row)]


def relative_error(found: Tensor, expected: Tensor, scale: Tensor) -> float:
    error = ((found.double() - expected).abs() / scale.clamp(min=1e-6)).detach()
    return error.max().item() if error.numel() else 0.0
