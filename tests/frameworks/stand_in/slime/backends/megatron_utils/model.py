"""In the shape of slime's, v0.2.4 to today: one ``train`` per rollout, on a config that outlives it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import rl_framework
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config
from megatron.training.global_vars import get_args
from megatron.training.training import get_model
from rl_framework import (
    disable_forward_pre_hook,
    enable_forward_pre_hook,
    forward_only,
    should_disable_forward_pre_hook,
    train_one_step,
)

from .checkpoint import load_checkpoint, save_checkpoint

__all__ = ["forward_only", "save", "train"]


def get_optimizer_param_scheduler(args: SimpleNamespace, optimizer: Any) -> OptimizerParamScheduler:
    return rl_framework.make_scheduler(args, optimizer)


def setup_model_and_optimizer(args: SimpleNamespace, role: str = "actor") -> tuple[Any, Any, Any]:
    model = get_model(args.model_provider, ModelType.encoder_or_decoder)
    if args.num_rollout == 0:
        args.no_load_optim = True
        return model, None, None

    config = rl_framework.optimizer_config(args)
    optimizer = get_megatron_optimizer(config=config, model_chunks=model, use_gloo_process_groups=False)
    if args.use_stateless_adam:
        for megatron_optimizer in getattr(optimizer, "chained_optimizers", [optimizer]):
            megatron_optimizer.init_state_fn = lambda *unused: None
    opt_param_scheduler = get_optimizer_param_scheduler(args, optimizer)
    return model, optimizer, opt_param_scheduler


def initialize_model_and_optimizer(args: SimpleNamespace, role: str = "actor") -> tuple[Any, Any, Any, int]:
    model, optimizer, opt_param_scheduler = setup_model_and_optimizer(args, role)
    model[0].role = role
    iteration, _ = load_checkpoint(
        model, optimizer, opt_param_scheduler, checkpointing_context={}, skip_load_to_model_and_opt=False
    )
    return model, optimizer, opt_param_scheduler, iteration


def train(
    rollout_id: int,
    model: Sequence[DDP],
    optimizer: Any,
    opt_param_scheduler: Any,
    data_iterator: Sequence[Any],
    num_microbatches: Sequence[int],
    global_batch_sizes: Sequence[int],
) -> None:
    args = get_args()
    assert len(num_microbatches) == len(global_batch_sizes)
    for iterator in data_iterator:
        iterator.reset()
    for model_module in model:
        model_module.train()

    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.timers = None
    if isinstance(model[0], DDP) and args.overlap_grad_reduce:
        assert config.no_sync_func is None, (
            "When overlap_grad_reduce is True, config.no_sync_func must be None; "
            "a custom no_sync_func is not supported when overlapping grad-reduce"
        )
        config.no_sync_func = [model_chunk.no_sync for model_chunk in model]
        if len(model) == 1:
            config.no_sync_func = config.no_sync_func[0]
        if args.align_grad_reduce:
            config.grad_sync_func = [model_chunk.start_grad_sync for model_chunk in model]
            if len(model) == 1:
                config.grad_sync_func = config.grad_sync_func[0]
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = [model_chunk.start_param_sync for model_chunk in model]
        if len(model) == 1:
            config.param_sync_func = config.param_sync_func[0]
    config.finalize_model_grads_func = finalize_model_grads

    pre_hook_enabled = False
    if args.manual_gc:
        gc.disable()
        gc.collect()
    if should_disable_forward_pre_hook(args):
        disable_forward_pre_hook(model, param_sync=False)
        param_sync_func = config.param_sync_func
        config.param_sync_func = None

    for step_id, microbatches in enumerate(num_microbatches):
        train_one_step(
            args,
            data_iterator,
            model,
            optimizer,
            opt_param_scheduler,
            microbatches,
            global_batch_sizes[step_id],
        )
        if step_id == 0 and should_disable_forward_pre_hook(args):
            enable_forward_pre_hook(model)
            config.param_sync_func = param_sync_func
            pre_hook_enabled = True
    if pre_hook_enabled:
        disable_forward_pre_hook(model)


def save(iteration: int, model: Sequence[DDP], optimizer: Any, opt_param_scheduler: Any) -> None:
    args = get_args()
    if should_disable_forward_pre_hook(args):
        disable_forward_pre_hook(model)
    save_checkpoint(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far=0)
    if should_disable_forward_pre_hook(args):
        enable_forward_pre_hook(model)
