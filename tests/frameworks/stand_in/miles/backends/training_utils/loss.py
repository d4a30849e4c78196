"""In the shape of miles: checkpointed as torch's default has it, with a copy of the scoring function."""

from __future__ import annotations

from typing import Any

from loss_parts import as_megatron_expects, custom_loss
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
    function = custom_loss(args)
    if args.recompute_loss_function:
        loss, log = checkpoint(function, args, batch, logits)
    else:
        loss, log = function(args, batch, logits)
    return as_megatron_expects(loss, log)
