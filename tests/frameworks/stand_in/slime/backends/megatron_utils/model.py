"""In the shape of slime's: one ``train`` per rollout, on a config that outlives it.

``initialize_model_and_optimizer`` advances a schedule that it has loaded, as up to v0.2.3.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from megatron.training.global_vars import get_args
from megatron.training.training import (
    disable_forward_pre_hook,
    enable_forward_pre_hook,
    get_model,
    should_disable_forward_pre_hook,
)
from steps import NO_SYNC, compute_gradients, install_sync_functions, train_steps, update

from tests.frameworks.jobs import scheduler_for

from .checkpoint import load_checkpoint, save_checkpoint
from .data import DataIterator, get_batch


def get_optimizer_param_scheduler(args: Any, optimizer: Any) -> Any:
    return scheduler_for(optimizer, args)


def setup_model_and_optimizer(args: Any, role: str = "actor") -> tuple[Any, Any, Any]:
    model = get_model(args.model_provider, ModelType.encoder_or_decoder)
    if args.num_rollout == 0:
        args.no_load_optim = True
        return model, None, None
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.min_lr,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(config=config, model_chunks=model, use_gloo_process_groups=False)
    return model, optimizer, get_optimizer_param_scheduler(args, optimizer)


def initialize_model_and_optimizer(args: Any, role: str = "actor") -> tuple[Any, Any, Any, int]:
    model, optimizer, opt_param_scheduler = setup_model_and_optimizer(args, role)
    model[0].role = role
    iteration, _ = load_checkpoint(
        model, optimizer, opt_param_scheduler, checkpointing_context={}, skip_load_to_model_and_opt=False
    )
    if opt_param_scheduler is not None:
        opt_param_scheduler.step(increment=iteration * args.global_batch_size)
    return model, optimizer, opt_param_scheduler, iteration


def train_one_step(
    args: Any,
    step_id: int,
    data_iterator: Any,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    microbatches: int,
    samples: int,
) -> None:
    compute_gradients(args.forward_step_func, data_iterator, model, optimizer, microbatches)
    update(optimizer, opt_param_scheduler, samples)


def train(
    rollout_id: int,
    model: Sequence[DDP],
    optimizer: Any,
    opt_param_scheduler: Any,
    data_iterator: Sequence[DataIterator],
    num_microbatches: Sequence[int],
    global_batch_sizes: Sequence[int],
) -> None:
    args, config = get_args(), get_model_config(model[0])
    for iterator in data_iterator:
        iterator.reset()
    for model_module in model:
        model_module.train()
    config.grad_scale_func = optimizer.scale_loss
    config.timers = None
    if isinstance(model[0], DDP) and args.overlap_grad_reduce:
        assert config.no_sync_func is None, NO_SYNC
        install_sync_functions(config, model)
    config.finalize_model_grads_func = finalize_model_grads
    state = data_iterator, model, optimizer, opt_param_scheduler
    sizes = enumerate(zip(num_microbatches, global_batch_sizes, strict=True))
    train_steps(args, model, [partial(train_one_step, args, number, *state, *each) for number, each in sizes])


def logits_of(model: torch.nn.Module, tokens_bs: torch.Tensor) -> torch.Tensor:
    """Return what the model predicts; its attention does not know where packed samples begin."""
    positions_bs = torch.arange(tokens_bs.shape[1])[None]
    mask_ss = torch.ones(1, 1, *tokens_bs.shape[1:] * 2, dtype=torch.bool).triu(1)
    logits: torch.Tensor = model(tokens_bs, positions_bs, mask_ss)
    return logits


@torch.no_grad()
def forward_only(
    f: Callable[..., Any],
    args: Any,
    model: Sequence[DDP],
    data_iterator: Sequence[DataIterator],
    num_microbatches: Sequence[int],
    store_prefix: str = "",
) -> dict[str, list[Any]]:
    """Return what ``f`` makes of the logits, by sample and in the order of the rollout."""
    [iterator] = data_iterator
    iterator.reset()
    for model_module in model:
        model_module.eval()

    def forward_step(iterator: DataIterator, chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = get_batch(iterator, ["tokens", "total_lengths", "response_lengths"])
        lengths = {key: batch[key] for key in ("total_lengths", "response_lengths")}
        return logits_of(chunk, batch["tokens"]), partial(f, args=args, with_entropy=False, **lengths)

    collected: list[dict[str, list[Any]]] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=sum(num_microbatches),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=True,
        collect_non_loss_data=args.collect_non_loss_data or False,
    )
    for model_module in model:
        model_module.train()
    order = [*chain(*iterator.micro_batch_indices)]
    results = {}
    for key in collected[0]:
        values = [*chain(*(one[key] for one in collected))]
        results[store_prefix + key] = [values[order.index(sample)] for sample in range(len(order))]
    return results


def save(iteration: int, model: Sequence[DDP], optimizer: Any, opt_param_scheduler: Any) -> None:
    args = get_args()
    if should_disable_forward_pre_hook(args):
        disable_forward_pre_hook(model)
    save_checkpoint(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far=0)
    if should_disable_forward_pre_hook(args):
        enable_forward_pre_hook(model)
