"""In the shape of Megatron-Bridge's: relies on installed sync functions, leaves its timer running."""

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel as DDP
from steps import compute_gradients, train_steps, update


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

    def train_step() -> None:
        compute_gradients(forward_step_func, train_data_iterator, model, optimizer, args.num_microbatches)
        update(optimizer, scheduler, args.num_microbatches * args.micro_batch_size)

    steps = args.train_iters - train_state.step
    train_steps(args, model, [train_step] * steps)
    train_state.step += steps
