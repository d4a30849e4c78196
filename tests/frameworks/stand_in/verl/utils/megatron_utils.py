"""In the shape of verl's: one round per model chunk, on a config that the chunks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_model_config
from steps import NO_SYNC, install_sync_functions


def register_megatron_training_hooks(model: Sequence[DDP], optimizer: Any) -> None:
    for one_model in model:
        config = get_model_config(one_model)
        config.grad_scale_func = optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if isinstance(model[0], DDP) and one_model.ddp_config.overlap_grad_reduce:
            assert config.no_sync_func is None, NO_SYNC
            install_sync_functions(config, model)
