"""The task: sort a row of digits. A checker scores every answer, so no reward model is needed.

A prompt is ``DIGITS`` random digits between two tokens that stand for an order; its answer is the same digits
in that order.
"""

from __future__ import annotations

import torch

DIGITS = 5
PROMPT = DIGITS + 2
LENGTH = PROMPT + DIGITS
ORDERS = ("ascending", "descending")
VOCABULARY = 10 + len(ORDERS)


def prompts(count: int, generator: torch.Generator, order: str | None = None) -> torch.Tensor:
    """Return random prompts, ``[count, PROMPT]``, of one order or of all."""
    device = generator.device
    digits_bd = torch.randint(10, (count, DIGITS), generator=generator, device=device)
    orders = ORDERS if order is None else (order,)
    first = 10 + ORDERS.index(orders[0])
    order_b1 = torch.randint(first, first + len(orders), (count, 1), generator=generator, device=device)
    return torch.cat([order_b1, digits_bd, order_b1], dim=1)


def order_of(tokens_bs: torch.Tensor) -> torch.Tensor:
    """Return the order of each prompt as an index into ``ORDERS``, ``[b]``."""
    return tokens_bs[:, 0] - 10


def solve(prompts_bp: torch.Tensor) -> torch.Tensor:
    """Return the right answers, ``[b, DIGITS]``."""
    ascending_bd = prompts_bp[:, 1:-1].sort(dim=1).values
    return torch.where(order_of(prompts_bp)[:, None] == 0, ascending_bd, ascending_bd.flip(1))


def score(tokens_bs: torch.Tensor) -> torch.Tensor:
    """Check answers: 1.0 for each right digit, 0.0 for each wrong one, ``[b, DIGITS]``."""
    return (tokens_bs[:, PROMPT:] == solve(tokens_bs[:, :PROMPT])).float()
