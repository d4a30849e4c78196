"""What every stand-in does in a step of training, Megatron-LM's included."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel as DDP

from tests.references.tiny_gpt import NO_SYNC as NO_SYNC
from tests.references.tiny_gpt import backward, disable_forward_pre_hook, enable_forward_pre_hook
from tests.references.tiny_gpt import install_sync_functions as install_sync_functions


def should_disable_forward_pre_hook(args: Any) -> bool:
    return args.use_distributed_optimizer and args.overlap_param_gather


def train_steps(args: Any, model: Sequence[DDP], steps: Sequence[Callable[[], object]]) -> None:
    """Take the steps; forward pre-hooks are on from the end of the first step to that of the last."""
    if args.manual_gc:
        gc.disable()
        gc.collect()
    if should_disable_forward_pre_hook(args):
        disable_forward_pre_hook(model, param_sync=False)
    for step_id, step in enumerate(steps):
        step()
        if step_id == 0 and should_disable_forward_pre_hook(args):
            enable_forward_pre_hook(model)
    if steps and should_disable_forward_pre_hook(args):
        disable_forward_pre_hook(model)


def compute_gradients(
    forward_step_func: Any, data_iterator: Any, model: Sequence[DDP], optimizer: Any, num_microbatches: int
) -> None:
    optimizer.zero_grad()
    backward(model, data_iterator, num_microbatches, forward_step_func)


def update(optimizer: Any, opt_param_scheduler: Any, samples: int) -> None:
    update_successful, _, _ = optimizer.step()
    assert update_successful
    opt_param_scheduler.step(increment=samples)
