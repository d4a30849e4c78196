"""In the shape of Megatron-LM's; ``args.disk`` takes the parameters, and may fail as a disk does."""

from __future__ import annotations

from typing import Any

from .global_vars import get_args


def save_checkpoint(
    iteration: int, model: Any, optimizer: Any, opt_param_scheduler: Any, **unused: Any
) -> None:
    parameters = [parameter.detach().clone() for chunk in model for parameter in chunk.parameters()]
    get_args().disk.write(iteration, parameters)
