"""A small Megatron GPT that writes answers, and the optimizer that trains it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from ..inference import forward_topk
from ..losses import TopKDistribution
from .digits import DIGITS, LENGTH, PROMPT, VOCABULARY

_LAYERS, _HIDDEN, _HEADS = 2, 64, 4
_LEARNING_RATE = 1e-3
# Parameters per bucket: of one bucket alone, no communication would overlap with computation.
_BUCKET = 25_000


def initialize(
    seed: int,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    context_parallel_size: int = 1,
) -> None:
    """Megatron's process groups and random number generators."""
    parallel_state.initialize_model_parallel(
        tensor_parallel_size,
        pipeline_parallel_size,
        context_parallel_size=context_parallel_size,
        create_gloo_process_groups=False,
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
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=True,
    )


def provide(config: TransformerConfig, pre_process: bool = True, post_process: bool = True) -> GPTModel:
    """Megatron's model provider."""
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
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
    model: Sequence[Any], prompts_bp: torch.Tensor, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let the model write: at temperature 1, or without a generator always what is most probable.

    Args:
        model: the chunks of this rank; all ranks of a replica write the same.
        prompts_bp: prompts, ``[b, PROMPT]``.
        generator: in the same state on all ranks of a replica.

    Returns:
        prompts with their answers, ``[b, PROMPT + DIGITS]``, and the log-probabilities of what it wrote,
        ``[b, DIGITS]``.
    """
    count, device = len(prompts_bp), prompts_bp.device
    tokens_bs = prompts_bp.new_zeros(count, LENGTH)
    tokens_bs[:, :PROMPT] = prompts_bp
    log_probs_bd = torch.empty(count, DIGITS, device=device)
    for number in range(DIGITS):
        # Of this digit, whatever is there now.
        microbatch = {
            "tokens": tokens_bs,
            "lengths": [PROMPT + number + 1] * count,
            "response_lengths": [1] * count,
        }
        waiting_bv = torch.ones(count, VOCABULARY, device=device)
        if generator is not None:  # on all ranks of a replica, so that their generators stay alike
            waiting_bv.exponential_(generator=generator)
        found = forward_topk(model, [microbatch], VOCABULARY, output_device=device, progress=False)
        if found is not None:
            every_token = TopKDistribution.cat(found)
            choice_b1 = (every_token.log_probs.exp() / waiting_bv).argmax(1, keepdim=True)
            tokens_bs[:, PROMPT + number] = every_token.indices.gather(1, choice_b1)[:, 0]
            log_probs_bd[:, number] = every_token.log_probs.gather(1, choice_b1)[:, 0]
        from_last_stage(tokens_bs)
    return tokens_bs, from_last_stage(log_probs_bd)


def from_last_stage(values: torch.Tensor) -> torch.Tensor:
    """Overwrite ``values`` with those of the last pipeline stage, on all stages."""
    torch.distributed.broadcast(
        values,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    return values


def mean_over_ranks(*values: torch.Tensor) -> list[float]:
    total = torch.stack(values)
    torch.distributed.all_reduce(total)
    return (total / torch.distributed.get_world_size()).tolist()


def positions(tokens_bs: torch.Tensor) -> torch.Tensor:
    """``position_ids`` of the tokens."""
    return torch.arange(tokens_bs.shape[1], device=tokens_bs.device).expand_as(tokens_bs)
