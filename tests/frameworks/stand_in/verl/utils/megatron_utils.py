"""In the shape of verl's: one round per model chunk, on a config that the chunks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_model_config
from megatron.training.training import one_or_all


def register_megatron_training_hooks(model: Sequence[DDP], optimizer: Any) -> None:
    for one_model in model:
        config = get_model_config(one_model)
        config.grad_scale_func = optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads

        overlap_param_gather = getattr(optimizer.config, "overlap_param_gather", False)
        overlap_grad_reduce = getattr(one_model.ddp_config, "overlap_grad_reduce", False)
        align_grad_reduce = True
        align_param_gather = getattr(one_model.ddp_config, "align_param_gather", False)

        if isinstance(model[0], DDP) and overlap_grad_reduce:
            assert config.no_sync_func is None, (
                "When overlap_grad_reduce is True, config.no_sync_func must be None; "
                "a custom no_sync_func is not supported when overlapping grad-reduce"
            )
            config.no_sync_func = one_or_all([model_chunk.no_sync for model_chunk in model])
            if align_grad_reduce:
                config.grad_sync_func = one_or_all([model_chunk.start_grad_sync for model_chunk in model])
        if overlap_param_gather and align_param_gather:
            config.param_sync_func = one_or_all([model_chunk.start_param_sync for model_chunk in model])
