"""In the shape of Megatron-Bridge's, v0.4 to today: installs the sync functions once per setup."""

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from steps import NO_SYNC, install_sync_functions


def _update_model_config_funcs(
    model: Sequence[DistributedDataParallel],
    model_config: Any,
    ddp_config: Any,
    optimizer: Any,
) -> None:
    if isinstance(model[0], DistributedDataParallel) and ddp_config.overlap_grad_reduce:
        assert model_config.no_sync_func is None, NO_SYNC
        install_sync_functions(model_config, model)
    model_config.finalize_model_grads_func = finalize_model_grads
    model_config.grad_scale_func = optimizer.scale_loss
