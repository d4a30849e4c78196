"""The task: put a row of digits in order. A checker scores every answer, so no reward model is needed.

A prompt is ``DIGITS`` random digits between two tokens for the order that is asked for; its answer is the
same digits in that order.
"""

from __future__ import annotations

import torch

DIGITS = 5
PROMPT = DIGITS + 2
LENGTH = PROMPT + DIGITS
ORDERS = ("ascending", "descending")
VOCABULARY = 10 + len(ORDERS)


def prompts(count: int, generator: torch.Generator, order: str | None = None) -> torch.Tensor:
    """Random prompts, ``[count, PROMPT]``: of one order, or of all of them."""
    device = generator.device
    digits_bd = torch.randint(10, (count, DIGITS), generator=generator, device=device)
    asked = ORDERS if order is None else (order,)
    first = 10 + ORDERS.index(asked[0])
    order_b1 = torch.randint(first, first + len(asked), (count, 1), generator=generator, device=device)
    return torch.cat([order_b1, digits_bd, order_b1], dim=1)


def asks_for(tokens_bs: torch.Tensor, order: str) -> torch.Tensor:
    """Which prompts ask for that order, ``[b]``."""
    return tokens_bs[:, 0] == 10 + ORDERS.index(order)


def solve(prompts_bp: torch.Tensor) -> torch.Tensor:
    """The right answers, ``[b, DIGITS]``."""
    ascending_bd = prompts_bp[:, 1:-1].sort(dim=1).values
    return torch.where(asks_for(prompts_bp, "ascending")[:, None], ascending_bd, ascending_bd.flip(1))


def score(tokens_bs: torch.Tensor) -> torch.Tensor:
    """The checker: 1.0 for every digit of the answers that is right, 0.0 for others, ``[b, DIGITS]``."""
    return (tokens_bs[:, PROMPT:] == solve(tokens_bs[:, :PROMPT])).float()
