"""Passes of a model through Megatron's schedule, and what they leave: gradients and weights in one vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from tests.references import tiny_gpt


def run_schedule(
    model: Sequence[Any],
    data: Any,
    num_microbatches: int,
    forward_step: Callable[..., Any] | None = None,
    forward_only: bool = False,
) -> list[Any]:
    """Run passes of microbatches, by default those of :mod:`tests.references.tiny_gpt`."""
    with torch.set_grad_enabled(not forward_only):
        reports: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step or tiny_gpt.forward_step,
            data_iterator=data,
            model=list(model),
            num_microbatches=num_microbatches,
            seq_length=tiny_gpt.SEQUENCE // parallel_state.get_context_parallel_world_size(),
            micro_batch_size=tiny_gpt.BATCH,
            forward_only=forward_only,
        )
    return reports


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
