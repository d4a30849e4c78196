"""In the shape of slime's: Megatron's loader, under its own name."""

from typing import Any

from megatron.training.checkpointing import load_checkpoint as load_checkpoint_megatron
from megatron.training.checkpointing import save_checkpoint as save_checkpoint


def load_checkpoint(ddp_model: Any, optimizer: Any, opt_param_scheduler: Any, **options: Any) -> Any:
    return load_checkpoint_megatron(ddp_model, optimizer, opt_param_scheduler, **options)
