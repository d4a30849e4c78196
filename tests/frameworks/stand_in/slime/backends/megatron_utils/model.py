"""In the shape of slime's, v0.2.4 to today: one ``train`` per rollout, on a config that outlives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import rl_framework
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.enums import ModelType
from megatron.training.global_vars import get_args
from megatron.training.training import (
    disable_forward_pre_hook,
    enable_forward_pre_hook,
    get_model,
    should_disable_forward_pre_hook,
)
from steps import NO_SYNC, install_sync_functions, train_steps

from tests.frameworks.jobs import scheduler_for

from .checkpoint import load_checkpoint, save_checkpoint
from .data import get_batch


def train_one_step(*step):
    return rl_framework.train_one_step(*step)


def get_optimizer_param_scheduler(args: Any, optimizer: Any) -> Any:
    return scheduler_for(optimizer, args)


def setup_model_and_optimizer(args: Any, role: str = "actor") -> tuple[Any, Any, Any]:
    model = get_model(args.model_provider, ModelType.encoder_or_decoder)
    if args.num_rollout == 0:
        args.no_load_optim = True
        return model, None, None
    optimizer = rl_framework.make_optimizer(args, model)
    return model, optimizer, get_optimizer_param_scheduler(args, optimizer)


def initialize_model_and_optimizer(args: Any, role: str = "actor") -> tuple[Any, Any, Any, int]:
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
    config = rl_framework.begin_rollout(model, optimizer, data_iterator)
    if isinstance(model[0], DDP) and args.overlap_grad_reduce:
        assert config.no_sync_func is None, NO_SYNC
        install_sync_functions(config, model)
    state = args, data_iterator, model, optimizer, opt_param_scheduler
    sizes = zip(num_microbatches, global_batch_sizes, strict=True)
    train_steps(args, model, [partial(train_one_step, *state, *step) for step in sizes])


def forward_only(
    f: Callable[..., Any],
    args: Any,
    model: Sequence[DDP],
    data_iterator: Sequence[Any],
    num_microbatches: Sequence[int],
    store_prefix: str = "",
) -> dict[str, list[Any]]:
    state = args, model, data_iterator, num_microbatches
    return rl_framework.forward_only(get_batch, f, *state, store_prefix, collect_non_loss_data=False)


def save(iteration: int, model: Sequence[DDP], optimizer: Any, opt_param_scheduler: Any) -> None:
    args = get_args()
    if should_disable_forward_pre_hook(args):
        disable_forward_pre_hook(model)
    save_checkpoint(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far=0)
    if should_disable_forward_pre_hook(args):
        enable_forward_pre_hook(model)
