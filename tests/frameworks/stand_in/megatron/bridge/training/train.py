"""In the shape of Megatron-Bridge's: relies on installed sync functions, leaves its timer running."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron.core.distributed import DistributedDataParallel as DDP
from steps import run_microbatches, train_steps, update, zero_gradients


def train(
    forward_step_func: Callable[..., Any],
    model: Sequence[DDP],
    optimizer: Any,
    scheduler: Any,
    train_data_iterator: Any,
    valid_data_iterator: Any,
    global_state: Any,
    checkpoint_manager: Any,
    pg_collection: Any,
) -> None:
    args, train_state = global_state.cfg.train, global_state.train_state
    for model_module in model:
        model_module.train()
    global_state.timers("interval-time", log_level=0).start(barrier=True)
    state = args, forward_step_func, train_data_iterator, model, optimizer, scheduler
    steps = args.train_iters - train_state.step
    train_steps(args, model, [partial(train_step, *state)] * steps)
    train_state.step += steps


def train_step(
    args: Any, forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any, scheduler: Any
) -> None:
    zero_gradients(model, optimizer)
    run_microbatches(args, forward_step_func, data_iterator, model, args.num_microbatches)
    update(optimizer, scheduler, args.num_microbatches * args.micro_batch_size)
