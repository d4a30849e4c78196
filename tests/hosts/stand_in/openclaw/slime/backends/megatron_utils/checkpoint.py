"""In the shape of slime's: Megatron's loader, or weights in the format of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.training.checkpointing import load_checkpoint as _load_checkpoint_megatron
from megatron.training.checkpointing import save_checkpoint
from megatron.training.global_vars import get_args

__all__ = ["load_checkpoint", "save_checkpoint"]


def load_checkpoint(
    ddp_model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    checkpointing_context: Any,
    skip_load_to_model_and_opt: bool,
) -> tuple[int, int]:
    args = get_args()
    if (Path(args.load) / "latest_checkpointed_iteration.txt").is_file():
        return _load_checkpoint_megatron(
            ddp_model=ddp_model,
            optimizer=optimizer,
            opt_param_scheduler=opt_param_scheduler,
            checkpointing_context=checkpointing_context,
            skip_load_to_model_and_opt=skip_load_to_model_and_opt,
        )
    [model] = ddp_model
    while hasattr(model, "module"):
        model = model.module
    model.load_state_dict(torch.load(Path(args.load) / "weights.pt"))
    if (args.fp16 or args.bf16) and optimizer is not None:
        optimizer.reload_model_params()
    return 0, 0
