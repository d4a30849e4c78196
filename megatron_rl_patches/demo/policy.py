"""A small Megatron GPT that writes answers, and the optimizer that trains it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from .digits import DIGITS, PROMPT, VOCABULARY

_LAYERS, _HIDDEN, _HEADS = 2, 64, 4
_LEARNING_RATE = 1e-3
# Parameters per bucket: of one bucket alone, no communication would overlap with computation.
_BUCKET = 25_000


def initialize(seed: int, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> None:
    """Megatron's process groups and random number generators."""
    parallel_state.initialize_model_parallel(
        tensor_parallel_size, pipeline_parallel_size, create_gloo_process_groups=False
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def generator_beside(model: list[DistributedDataParallel], seed: int) -> torch.Generator:
    """For prompts and sampling: another one for each replica of the model, the same within a replica."""
    replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    return torch.Generator(next(model[0].parameters()).device).manual_seed(seed * replicas + replica)


def config() -> TransformerConfig:
    return TransformerConfig(
        num_layers=_LAYERS,
        hidden_size=_HIDDEN,
        num_attention_heads=_HEADS,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=True,
    )


def provide(config: TransformerConfig, pre_process: bool = True, post_process: bool = True) -> GPTModel:
    """Megatron's model provider."""
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=PROMPT + DIGITS,
        pre_process=pre_process,
        post_process=post_process,
    )


def build(seed: int) -> tuple[list[DistributedDataParallel], Any]:
    """Model chunks, as Megatron's ``get_model`` returns them, and optimizer."""
    torch.manual_seed(seed)
    gpt_config = config()
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        use_distributed_optimizer=True,
        bucket_size=_BUCKET,
    )
    gpt = provide(
        gpt_config, parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    )
    model = [DistributedDataParallel(gpt_config, ddp_config, gpt.cuda())]
    for chunk in model:
        chunk.broadcast_params()
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=_LEARNING_RATE,
        weight_decay=0.0,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
    )
    return model, get_megatron_optimizer(optimizer_config, model, use_gloo_process_groups=False)


@torch.no_grad()
def answer(
    model: list[DistributedDataParallel], prompts_bp: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let the model write, at temperature 1.

    Args:
        model: the chunks of this rank; all ranks of a replica write the same.
        prompts_bp: prompts, ``[b, PROMPT]``.
        generator: in the same state on all ranks of a replica.

    Returns:
        prompts with their answers, ``[b, PROMPT + DIGITS]``, and the log-probabilities of what it wrote,
        ``[b, DIGITS]``.
    """
    (chunk,) = model
    chunk.eval()
    tokens_bs, log_probs = prompts_bp, []
    for _ in range(DIGITS):
        log_probs_bv = _next_token_log_probs(chunk, tokens_bs)
        token_b1 = torch.multinomial(log_probs_bv.exp(), 1, generator=generator)
        log_probs.append(log_probs_bv.gather(1, token_b1))
        tokens_bs = torch.cat([tokens_bs, token_b1], dim=1)
    return tokens_bs, torch.cat(log_probs, dim=1)


def _next_token_log_probs(chunk: DistributedDataParallel, tokens_bs: torch.Tensor) -> torch.Tensor:
    """``[b, VOCABULARY]`` on all ranks: one pipeline stage after the other computes and tells the others."""
    batch, length = tokens_bs.shape
    group = parallel_state.get_pipeline_model_parallel_group()
    stages = torch.distributed.get_process_group_ranks(group)
    received = None
    for stage in stages:
        is_last = stage == stages[-1]
        if stage == torch.distributed.get_rank():
            chunk.module.set_input_tensor(received)
            output = chunk(tokens_bs, positions(tokens_bs), attention_mask=None)
            if is_last:
                logits_bv = tensor_parallel.gather_from_tensor_model_parallel_region(output[:, -1])
                output = logits_bv.float().log_softmax(dim=-1)
        else:
            shape = (batch, VOCABULARY) if is_last else (length, batch, _HIDDEN)
            output = torch.empty(shape, device=tokens_bs.device)
        torch.distributed.broadcast(output, src=stage, group=group)
        received = output
    return output


def positions(tokens_bs: torch.Tensor) -> torch.Tensor:
    """``position_ids`` of the tokens."""
    return torch.arange(tokens_bs.shape[1], device=tokens_bs.device).expand_as(tokens_bs)
