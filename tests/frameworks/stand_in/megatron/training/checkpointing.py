"""In the shape of Megatron-LM's, core_v0.12 to 0.14: the loader leaves its traces in the arguments.

``args.disk`` takes the parameters of a save; what is loaded is a file in the legacy layout.
"""

from pathlib import Path
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import update_num_microbatches

from .global_vars import get_args

_CHECKPOINT_VERSION: float | None = None


def save_checkpoint(
    iteration: int, model: Any, optimizer: Any, opt_param_scheduler: Any, **unused: Any
) -> None:
    get_args().disk.write(iteration, model)


def load_checkpoint(
    ddp_model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,
    **unused: Any,
) -> tuple[int, int]:
    global _CHECKPOINT_VERSION

    args = get_args()
    folder = Path(getattr(args, load_arg))
    iteration = int((folder / "latest_checkpointed_iteration.txt").read_text())
    path = folder / f"iter_{iteration:07d}" / "mp_rank_00" / "model_optim_rng.pt"
    state_dict = torch.load(path, weights_only=False)
    assert _CHECKPOINT_VERSION in (None, state_dict["checkpoint_version"])
    _CHECKPOINT_VERSION = state_dict["checkpoint_version"]

    assert args.consumed_train_samples == 0
    assert args.consumed_valid_samples == args.skipped_train_samples == 0
    if args.finetune:
        iteration = 0
    else:
        vars(args).update(state_dict["args"])
        update_num_microbatches(consumed_samples=args.consumed_train_samples)

    [model] = ddp_model
    while hasattr(model, "module"):
        model = model.module
    model.load_state_dict(state_dict["model"], strict=strict)
    if not args.finetune and not args.no_load_optim:
        opt_param_scheduler.load_state_dict(state_dict["opt_param_scheduler"])
    if (args.fp16 or args.bf16) and optimizer is not None:
        optimizer.reload_model_params()
    if not args.finetune and not args.no_load_rng:
        torch.set_rng_state(state_dict["rng_state"])
    return iteration, 0
