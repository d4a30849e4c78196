"""What the stand-ins for slime and miles have in common, and call from their own functions.

The names that patches replace, and the copies of Megatron's names, are in the stand-ins' own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.utils import get_model_config
from megatron.training.checkpointing import load_checkpoint as load_checkpoint_megatron
from megatron.training.global_vars import get_args
from steps import run_microbatches, update, zero_gradients

# --- building and loading


def make_optimizer(args: Any, model: Any) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.min_lr,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(config=config, model_chunks=model, use_gloo_process_groups=False)
    if args.use_stateless_adam:
        for megatron_optimizer in getattr(optimizer, "chained_optimizers", [optimizer]):
            megatron_optimizer.init_state_fn = lambda *unused: None
    return optimizer


def load_checkpoint(ddp_model: Any, optimizer: Any, opt_param_scheduler: Any, **options: Any) -> Any:
    """Call Megatron's loader, or load weights in the format of Hugging Face."""
    args = get_args()
    if (Path(args.load) / "latest_checkpointed_iteration.txt").is_file():
        return load_checkpoint_megatron(ddp_model, optimizer, opt_param_scheduler, **options)
    [model] = ddp_model
    while hasattr(model, "module"):
        model = model.module
    model.load_state_dict(torch.load(Path(args.load) / "weights.pt"))
    if (args.fp16 or args.bf16) and optimizer is not None:
        optimizer.reload_model_params()
    return 0, 0


# --- training


def begin_rollout(model: Sequence[DDP], optimizer: Any, data_iterator: Sequence[Any]) -> Any:
    """Return the config, without the sync functions, which ``train`` of a framework installs itself."""
    for iterator in data_iterator:
        iterator.reset()
    for model_module in model:
        model_module.train()
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    config.timers = None
    return config


def train_one_step(
    args: Any,
    data_iterator: Any,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    microbatches: int,
    samples: int,
) -> None:
    zero_gradients(model, optimizer)
    run_microbatches(args, args.forward_step_func, data_iterator, model, microbatches)
    update(optimizer, scheduler, samples)
    zero_gradients(model, optimizer)


# --- rollouts, and what the model says of them


class DataIterator:
    """A rollout, cut into microbatches."""

    def __init__(self, rollout_data: dict[str, Any]) -> None:
        self.rollout_data, self.offset = rollout_data, 0
        self.micro_batch_indices = rollout_data["micro_batch_indices"]

    def get_next(self, keys: Sequence[str]) -> dict[str, Any]:
        indices = self.micro_batch_indices[self.offset]
        self.offset += 1
        selected = {key: self.rollout_data.get(key) for key in keys}
        return {key: values and [values[i] for i in indices] for key, values in selected.items()}

    def reset(self) -> None:
        self.offset = 0


def logits_of(model: torch.nn.Module, tokens_bs: torch.Tensor) -> torch.Tensor:
    """Return what the model predicts; its attention does not know where packed samples begin."""
    positions_bs = torch.arange(tokens_bs.shape[1])[None]
    mask_ss = torch.ones(1, 1, *tokens_bs.shape[1:] * 2, dtype=torch.bool).triu(1)
    logits: torch.Tensor = model(tokens_bs, positions_bs, mask_ss)
    return logits


@torch.no_grad()
def forward_only(
    get_batch: Callable[..., dict[str, Any]],
    f: Callable[..., Any],
    args: Any,
    model: Sequence[DDP],
    data_iterator: Sequence[DataIterator],
    num_microbatches: Sequence[int],
    store_prefix: str,
    **options: Any,
) -> dict[str, list[Any]]:
    """Return what ``f`` makes of the logits, by sample and in the order of the rollout."""
    for iterator in data_iterator:
        iterator.reset()
    for model_module in model:
        model_module.eval()

    def forward_step(iterator: DataIterator, chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = get_batch(iterator, ["tokens", "total_lengths", "response_lengths"])
        lengths = {key: batch[key] for key in ("total_lengths", "response_lengths")}
        return logits_of(chunk, batch["tokens"]), partial(f, args=args, with_entropy=False, **lengths)

    collected: list[dict[str, list[Any]]] = run_microbatches(
        args, forward_step, data_iterator, model, sum(num_microbatches), forward_only=True, **options
    )
    for model_module in model:
        model_module.train()
    order = [*chain(*data_iterator[0].micro_batch_indices)]
    results = {}
    for key in collected[0]:
        values = [*chain(*(one[key] for one in collected))]
        results[store_prefix + key] = [values[order.index(sample)] for sample in range(len(order))]
    return results
