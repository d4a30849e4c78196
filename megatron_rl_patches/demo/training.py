"""An ordinary Megatron-core training loop, as upstream and frameworks write it, and its losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from ..losses import (
    DistillationBatch,
    PolicyBatch,
    SequenceLayout,
    make_distillation_loss_func,
    make_loss_func,
)
from .policy import DIGITS, LENGTH, Batch

#: Maps the logits of a batch to the loss, the number of tokens and metrics, as Megatron's schedules expect.
LossFunc = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]
Objective = Callable[[Batch], LossFunc]


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

    for microbatches in num_microbatches:
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=partial(_forward_step, objective),
            data_iterator=data_iterator,
            model=list(model),
            num_microbatches=microbatches,
            # Pipeline stages send each other tensors of this size.
            seq_length=LENGTH,
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


def _forward_step(
    objective: Objective, data_iterator: Iterator[Batch], model: torch.nn.Module
) -> tuple[torch.Tensor, LossFunc]:
    batch = next(data_iterator)
    tokens_bs = batch["tokens"]
    positions_bs = torch.arange(tokens_bs.shape[1], device=tokens_bs.device).expand_as(tokens_bs)
    return model(_cut(tokens_bs), _cut(positions_bs), attention_mask=None), objective(batch)


def _cut(values_bs: torch.Tensor) -> torch.Tensor:
    """Return the two pieces of sequences ``[b, s]`` that this context-parallel rank has (zigzag)."""
    rank = parallel_state.get_context_parallel_rank()
    pieces = values_bs.chunk(2 * parallel_state.get_context_parallel_world_size(), dim=1)
    return torch.cat([pieces[rank], pieces[-1 - rank]], dim=1)


# --- objectives: losses of the answers


def policy_loss(batch: Batch) -> LossFunc:
    """Return PPO's loss of a batch.

    For advantages of one and no old log-probs, its gradient is that of the negative log-likelihood.
    """
    tokens, advantages = batch["tokens"], list(batch["advantages"])
    masks = [torch.ones_like(advantage) for advantage in advantages]
    policy_batch = PolicyBatch(advantages, masks, old_log_probs=batch.get("log_probs"))
    return make_loss_func(list(tokens), _layout(tokens), policy_batch, with_entropy=False, **_options())


def distillation_loss(batch: Batch) -> LossFunc:
    """Return the reverse KL divergence of a batch from the teachers."""

    def loss_func(logits_bsv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        # The last pipeline stage calls this function, and only that stage has the teachers' distributions.
        masks = [torch.ones(DIGITS)] * len(batch["tokens"])
        distillation_batch = DistillationBatch([batch["teachers"]], masks)
        distill = make_distillation_loss_func(_layout(batch["tokens"]), distillation_batch, **_options())
        return distill(logits_bsv)

    return loss_func


def _options() -> dict[str, Any]:
    return {
        "tp_group": parallel_state.get_tensor_model_parallel_group(),
        "cp_group": parallel_state.get_context_parallel_group(),
        "recompute": True,
    }


def _layout(tokens_bs: torch.Tensor) -> SequenceLayout:
    count, length = tokens_bs.shape
    return SequenceLayout.build(
        [length] * count,
        [DIGITS] * count,
        qkv_format="bshd",
        max_seq_lens=[length] * count,
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        device=tokens_bs.device,
    )
