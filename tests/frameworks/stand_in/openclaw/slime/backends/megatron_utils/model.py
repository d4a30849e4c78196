"""In the shape of the slime that OpenClaw-RL vendors: after loading, the scheduler is advanced once more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

from .checkpoint import load_checkpoint


def get_optimizer_param_scheduler(args: SimpleNamespace, optimizer: Any) -> OptimizerParamScheduler:
    return rl_framework.make_scheduler(args, optimizer)


def wrap_model_provider_with_freeze(
    provider: Callable[..., Any], args: SimpleNamespace
) -> Callable[..., Any]:
    return provider


def setup_model_and_optimizer(args: SimpleNamespace, role: str = "actor") -> tuple[Any, Any, Any]:
    model = get_model(
        wrap_model_provider_with_freeze(args.model_provider, args), ModelType.encoder_or_decoder
    )
    config = rl_framework.optimizer_config(args)
    optimizer = get_megatron_optimizer(config=config, model_chunks=model, use_gloo_process_groups=False)
    opt_param_scheduler = get_optimizer_param_scheduler(args, optimizer)
    return model, optimizer, opt_param_scheduler


def initialize_model_and_optimizer(args: SimpleNamespace, role: str = "actor") -> tuple[Any, Any, Any, int]:
    model, optimizer, opt_param_scheduler = setup_model_and_optimizer(args, role)
    model[0].role = role
    iteration, _ = load_checkpoint(
        model, optimizer, opt_param_scheduler, checkpointing_context={}, skip_load_to_model_and_opt=False
    )
    opt_param_scheduler.step(increment=iteration * args.global_batch_size)
    return model, optimizer, opt_param_scheduler, iteration


def train(
    rollout_id: int,
    model: Sequence[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    data_iterator: Sequence[Any],
    num_microbatches: Sequence[int],
) -> None:
    args = get_args()
    for model_module in model:
        model_module.train()
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    if isinstance(model[0], DDP) and args.overlap_grad_reduce:
        assert config.no_sync_func is None, (
            "When overlap_grad_reduce is True, config.no_sync_func must be None; "
            "a custom no_sync_func is not supported when overlapping grad-reduce"
        )
        config.no_sync_func = model[0].no_sync
    config.finalize_model_grads_func = finalize_model_grads
    for microbatches in num_microbatches:
        rl_framework.train_one_step(
            args, data_iterator, model, optimizer, opt_param_scheduler, microbatches, args.global_batch_size
        )


def save(iteration: int, model: Sequence[Any], optimizer: Any, opt_param_scheduler: Any) -> None: ...
