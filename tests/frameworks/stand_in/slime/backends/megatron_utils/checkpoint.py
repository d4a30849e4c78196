"""In the shape of slime's: Megatron's loader, or weights in the format of Hugging Face."""

from typing import Any

import rl_framework
from megatron.training.checkpointing import save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]


def load_checkpoint(ddp_model: Any, optimizer: Any, opt_param_scheduler: Any, **options: Any) -> Any:
    return rl_framework.load_checkpoint(ddp_model, optimizer, opt_param_scheduler, **options)
