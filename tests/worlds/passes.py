"""Gradients and weights of a model in one vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def gradients_of(model: Sequence[Any]) -> torch.Tensor:
    return torch.cat([p.main_grad.flatten() for chunk in model for p in chunk.parameters()]).clone()


def weights_of(model: Sequence[Any]) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for chunk in model for p in chunk.parameters()])


def fill_at_random(model: Sequence[Any], seed: int = 0, scale: float = 0.1) -> None:
    """Give every weight of this rank a random value."""
    generator = torch.Generator().manual_seed(seed)
    for chunk in model:
        for parameter in chunk.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)
