"""What log-probabilities at given ids and of the tail must equal, in float64 over the whole vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl_patches.losses import vocab_parallel_log_probs_at

from .dense import relative_error

NO_ENTRY = -100


def dense_log_probs_at(
    logits: Tensor, indices: Tensor, rows: Tensor | slice | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Differentiable; the tail is the log-sum-exp of the log-probabilities outside the ids."""
    z = logits.double() if rows is None else logits.double()[rows]
    log_p = torch.log_softmax(z / temperature, 1)
    none = indices == NO_ENTRY
    log_probs = log_p.gather(1, indices.clamp(min=0)).masked_fill(none, float("-inf"))
    # One column more, for what is no id.
    inside = torch.zeros(len(z), z.shape[1] + 1, dtype=torch.bool)
    inside.scatter_(1, torch.where(none, z.shape[1], indices), True)
    return log_probs, log_p.masked_fill(inside[:, :-1], float("-inf")).logsumexp(1)


def random_indices(rows: int, columns: int, k: int, seed: int = 3) -> Tensor:
    """With an id twice and thrice, first and last columns, missing entries, and a row of those alone."""
    indices = torch.randint(columns, (rows, k), generator=torch.Generator().manual_seed(seed))
    indices[::3, -1] = indices[::3, 0]
    indices[1::4, :3] = columns - 1
    indices[2::4, 1] = 0
    indices[3::5, k // 2] = NO_ENTRY
    indices[rows // 2] = NO_ENTRY
    return indices


class Errors(NamedTuple):
    """Relative to each value, and of gradients to the largest of the row; below 1e-6 counts as 1e-6."""

    log_prob: float
    tail: float
    gradient: float


def errors(
    logits: Tensor,
    indices: Tensor,
    *,
    inplace_backward: bool = False,
    columns: slice = slice(None),
    **options: Any,
) -> Errors:
    """What is made of the whole ``logits``, with a weight of its own for each log-probability and tail."""
    known = {name: options[name] for name in ("rows", "temperature") if name in options}
    leaf = logits.detach().double().requires_grad_()
    expected = dense_log_probs_at(leaf, indices, **known)
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(values.shape, generator=generator).double() for values in expected]
    finite = [values > float("-inf") for values in expected]

    def weighted(found: tuple[Tensor, ...]) -> Tensor:
        return torch.stack(
            [
                (torch.where(ok, values, 0.0).double() * weight).sum()
                for values, weight, ok in zip(found, weights, finite, strict=True)
            ]
        ).sum()

    weighted(expected).backward()  # type: ignore[no-untyped-call]
    mine = logits[:, columns].detach().clone().requires_grad_()
    found = vocab_parallel_log_probs_at(
        mine * 1 if inplace_backward else mine,
        indices,
        with_tail=True,
        inplace_backward=inplace_backward,
        **options,
    )
    for values, ok in zip(found, finite, strict=True):
        assert values.dtype == (mine.dtype if mine.dtype == torch.float64 else torch.float32)
        assert (values[~ok] == float("-inf")).all()
    weighted(found).backward()  # type: ignore[no-untyped-call]
    assert mine.grad is not None
    assert leaf.grad is not None
    assert mine.grad.dtype == mine.dtype
    in_log_probs, in_tail = (
        relative_error(values[ok], wanted[ok], wanted[ok].abs())
        for values, wanted, ok in zip(found, expected, finite, strict=True)
    )
    of_row = leaf.grad.abs().amax(1, keepdim=True)
    return Errors(in_log_probs, in_tail, relative_error(mine.grad, leaf.grad[:, columns], of_row))
