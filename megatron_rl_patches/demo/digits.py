"""The task: put a row of digits in order. A checker scores every answer, so no reward model is needed.

A prompt is ``DIGITS`` random digits and a separator; its answer is the same digits, ascending.
"""

from __future__ import annotations

import torch

DIGITS = 5
PROMPT = DIGITS + 1
VOCABULARY = 11
_SEPARATOR = 10


def prompts(count: int, generator: torch.Generator) -> torch.Tensor:
    """Random prompts, ``[count, PROMPT]``."""
    device = generator.device
    digits_bd = torch.randint(10, (count, DIGITS), generator=generator, device=device)
    separator_b1 = torch.full((count, 1), _SEPARATOR, device=device)
    return torch.cat([digits_bd, separator_b1], dim=1)


def score(tokens_bs: torch.Tensor) -> torch.Tensor:
    """The checker: 1.0 for every digit of the answers that is right, 0.0 for others, ``[b, DIGITS]``."""
    digits_bd, answer_bd = tokens_bs[:, :DIGITS], tokens_bs[:, PROMPT:]
    return (answer_bd == digits_bd.sort(dim=1).values).float()
