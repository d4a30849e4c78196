"""What the vocabulary-parallel losses must equal: the formulas over the whole vocabulary, in float64."""

from __future__ import annotations

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
) -> tuple[Tensor, Tensor]:
    """Differentiable; ``p * log p`` is 0 where ``p`` is."""
    z = logits.double() if rows is None else logits.double()[rows]
    counts, column = targets != IGNORE, targets.clamp(min=0)[:, None]
    z = torch.where(counts[:, None], z / temperature, 0.0)
    kept = z
    if keep_mask is not None:
        kept = z.masked_fill(~keep_mask.scatter(1, column, True), float("-inf"))
    log_prob = torch.log_softmax(kept, 1).gather(1, column).squeeze(1)
    log_p = torch.log_softmax(z, 1)
    log_p = torch.where(log_p < -700, -700.0, log_p)  # not 0 * inf
    entropy = -(log_p.exp() * log_p).sum(1)
    return torch.where(counts, log_prob, 0.0), torch.where(counts, entropy, 0.0)


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
    tp_group: Any = None,
    columns: slice = slice(None),
    **options: Any,
) -> Errors:
    """What the loss makes of the whole ``logits``, each value and its gradient weighted differently.

    ``columns`` are those of this rank; a keep-mask is given whole, too.
    """
    row_options = {name: options[name] for name in ("rows", "temperature", "keep_mask") if name in options}
    leaf = logits.double().requires_grad_()
    expected = dense_log_probs_and_entropy(leaf, targets, **row_options)
    weights = torch.linspace(-1.0, 2.0, 2 * len(targets), dtype=torch.float64).view(2, -1)
    if not entropy_grad:
        weights[1] = 0.0
    (torch.stack(expected) * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None

    if options.get("keep_mask") is not None:
        options["keep_mask"] = options["keep_mask"][:, columns]
    mine = logits[:, columns].detach().clone().requires_grad_()
    found = vocab_parallel_log_probs_and_entropy(
        mine * 1 if inplace_backward else mine,
        targets,
        tp_group=tp_group,
        entropy_grad=entropy_grad,
        inplace_backward=inplace_backward,
        **options,
    )
    assert all(
        values.dtype == (mine.dtype if mine.dtype == torch.float64 else torch.float32) for values in found
    )
    assert found[1].requires_grad == entropy_grad
    loss = (found[0] * weights[0]).sum()
    if entropy_grad:
        loss = loss + (found[1] * weights[1]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert mine.grad is not None
    assert mine.grad.dtype == mine.dtype
    of_row = leaf.grad.abs().amax(1, keepdim=True)
    return Errors(
        relative_error(found[0], expected[0], expected[0].abs()),
        relative_error(found[1], expected[1], expected[1].abs()),
        relative_error(mine.grad, leaf.grad[:, columns], of_row),
    )


def relative_error(found: Tensor, expected: Tensor, scale: Tensor) -> float:
    error = ((found.double() - expected).abs() / scale.clamp(min=1e-6)).detach()
    return error.max().item() if error.numel() else 0.0
