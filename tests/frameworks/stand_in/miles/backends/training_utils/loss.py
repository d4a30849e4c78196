"""In the shape of miles: checkpointed as torch's default has it, with a copy of the scoring function."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .loss_hub.logit_processors import get_log_probs_and_entropy  # noqa: F401


def loss_function(
    args: Any,
    batch: dict[str, Any],
    num_microbatches: int,
    logits: Tensor,
    apply_megatron_loss_scaling: bool = False,
    num_rollouts: int | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    home, _, name = args.custom_loss_function_path.rpartition(".")
    function = getattr(importlib.import_module(home), name)
    if args.recompute_loss_function:
        loss, log = checkpoint(function, args, batch, logits)
    else:
        loss, log = function(args, batch, logits)
    if args.allgather_cp:
        loss = loss + 0 * logits.sum()
    return loss, torch.tensor(1), {"keys": list(log), "values": torch.tensor([1.0, *log.values()])}
