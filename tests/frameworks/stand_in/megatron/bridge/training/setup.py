"""In the shape of Megatron-Bridge's, v0.4 to today: installs the sync functions once per setup."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.training.training import one_or_all


def _update_model_config_funcs(
    model: Sequence[DistributedDataParallel],
    model_config: Any,
    ddp_config: Any,
    optimizer: Any,
    *,
    align_grad_reduce: bool = True,
    pg_collection: Any = None,
) -> None:
    if isinstance(model[0], DistributedDataParallel) and ddp_config.overlap_grad_reduce:
        assert model_config.no_sync_func is None, (
            "When overlap_grad_reduce is True, config.no_sync_func must be None; "
            "a custom no_sync_func is not supported when overlapping grad-reduce"
        )
        model_config.no_sync_func = one_or_all([model_chunk.no_sync for model_chunk in model])
        if align_grad_reduce:
            model_config.grad_sync_func = one_or_all([model_chunk.start_grad_sync for model_chunk in model])
    if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
        model_config.param_sync_func = one_or_all([model_chunk.start_param_sync for model_chunk in model])
    if optimizer is not None:
        model_config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=pg_collection)
        model_config.grad_scale_func = optimizer.scale_loss


def setup(state: SimpleNamespace, model: Sequence[DistributedDataParallel], optimizer: Any) -> None:
    """The real one builds model and optimizer; here they are given."""
    _update_model_config_funcs(
        model, state.cfg.model, state.cfg.ddp, optimizer, align_grad_reduce=state.cfg.dist.align_grad_reduce
    )
