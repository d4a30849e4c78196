"""A training loop for Megatron-core, as Megatron-LM and frameworks for reinforcement learning write it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config


def train(
    forward_step: Callable[..., Any],
    data_iterator: Iterator[Any],
    model: Sequence[DistributedDataParallel],
    optimizer: Any,
    *,
    steps: int,
    num_microbatches: int,
    micro_batch_size: int,
    seq_length: int,
) -> None:
    """Train on one rollout, with ``num_microbatches`` microbatches in each optimizer step."""
    for chunk in model:
        chunk.train()
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    if model[0].ddp_config.overlap_grad_reduce:
        assert config.no_sync_func is None, (
            "When overlap_grad_reduce is True, config.no_sync_func must be None; "
            "a custom no_sync_func is not supported when overlapping grad-reduce"
        )
        functions = [chunk.no_sync for chunk in model]
        config.no_sync_func = functions[0] if len(functions) == 1 else functions
    config.finalize_model_grads_func = finalize_model_grads

    overlap_param_gather = model[0].ddp_config.overlap_param_gather
    param_sync_func = config.param_sync_func
    pre_hooks_on = False
    if overlap_param_gather:
        # As upstream: the first step runs without hooks, so that it shows errors of loading and building.
        for chunk in model:
            chunk.disable_forward_pre_hook(param_sync=False)
        config.param_sync_func = None

    for _ in range(steps):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data_iterator,
            model=list(model),
            num_microbatches=num_microbatches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
        )
        optimizer.step()
        if overlap_param_gather and not pre_hooks_on:
            for chunk in model:
                chunk.enable_forward_pre_hook()
            config.param_sync_func = param_sync_func
            pre_hooks_on = True
    if pre_hooks_on:
        for chunk in model:
            chunk.disable_forward_pre_hook()
