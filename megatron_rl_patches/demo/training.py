"""One ``train()`` call per rollout: an ordinary Megatron-core training loop, the way hosts write it.

It installs the model's ``no_sync`` on the config after asserting that nothing is there, and keeps the forward
pre-hooks of overlapped parameter gathering off during the first step of each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from .digits import LENGTH
from .policy import positions

#: ``tokens`` [b, s]; for the policy loss also ``log_probs`` under the policy that wrote them and
#: ``advantages``, [b, DIGITS]; for distillation ``teachers``, a distribution for each answer.
Batch = dict[str, Any]
#: Of the logits that the model returns for a batch: what Megatron's schedules take from a loss function.
LossFunc = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]
Objective = Callable[[Batch], LossFunc]


def shuffled(count: int, pieces: int, generator: torch.Generator) -> Sequence[torch.Tensor]:
    """A rollout in random order, in pieces: every answer is trained on once."""
    return torch.randperm(count, generator=generator, device=generator.device).chunk(pieces)


def train(
    model: Sequence[DistributedDataParallel],
    optimizer: Any,
    data_iterator: Iterator[Batch],
    num_microbatches: Sequence[int],
    micro_batch_size: int,
    objective: Objective,
) -> None:
    """Train on one rollout: one optimizer step per entry of ``num_microbatches``."""
    for chunk in model:
        chunk.train()
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    if model[0].ddp_config.overlap_grad_reduce:
        assert config.no_sync_func is None, (
            "When overlap_grad_reduce is True, config.no_sync_func must be None; "
            "a custom no_sync_func is not supported when overlapping grad-reduce"
        )
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in model])
    config.finalize_model_grads_func = finalize_model_grads

    overlap_param_gather = model[0].ddp_config.overlap_param_gather
    param_sync_func = config.param_sync_func
    pre_hooks_on = False
    if overlap_param_gather:
        # What went wrong at loading or building shall show in the first step, before a gather spreads it.
        _disable_forward_pre_hook(model, param_sync=False)
        config.param_sync_func = None

    for microbatches in num_microbatches:
        _train_step(model, optimizer, data_iterator, microbatches, micro_batch_size, objective)
        if overlap_param_gather and not pre_hooks_on:
            _enable_forward_pre_hook(model)
            config.param_sync_func = param_sync_func
            pre_hooks_on = True
    if pre_hooks_on:
        _disable_forward_pre_hook(model)


def _train_step(
    model: Sequence[DistributedDataParallel],
    optimizer: Any,
    data_iterator: Iterator[Batch],
    num_microbatches: int,
    micro_batch_size: int,
    objective: Objective,
) -> None:
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=partial(_forward_step, objective),
        data_iterator=data_iterator,
        model=list(model),
        num_microbatches=num_microbatches,
        # What pipeline stages send each other.
        seq_length=LENGTH,
        micro_batch_size=micro_batch_size,
    )
    optimizer.step()


def _forward_step(
    objective: Objective, data_iterator: Iterator[Batch], model: torch.nn.Module
) -> tuple[torch.Tensor, LossFunc]:
    batch = next(data_iterator)
    tokens_bs = batch["tokens"]
    logits_bsv = model(_cut(tokens_bs), _cut(positions(tokens_bs)), attention_mask=None)
    return logits_bsv, objective(batch)


def _cut(values_bs: torch.Tensor) -> torch.Tensor:
    """What a context-parallel rank has of sequences: a piece from either end."""
    rank = parallel_state.get_context_parallel_rank()
    pieces = values_bs.chunk(2 * parallel_state.get_context_parallel_world_size(), dim=1)
    return torch.cat([pieces[rank], pieces[-1 - rank]], dim=1)


def _enable_forward_pre_hook(model: Sequence[DistributedDataParallel]) -> None:
    for chunk in model:
        chunk.enable_forward_pre_hook()


def _disable_forward_pre_hook(model: Sequence[DistributedDataParallel], param_sync: bool = True) -> None:
    for chunk in model:
        chunk.disable_forward_pre_hook(param_sync=param_sync)


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions
