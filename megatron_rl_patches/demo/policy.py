"""A small Megatron GPT that writes answers, and the optimizer that trains it."""

from __future__ import annotations

from typing import Any

import torch
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


def initialize(seed: int) -> None:
    """Megatron's process groups and random number generators; every rank is a replica."""
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def config() -> TransformerConfig:
    return TransformerConfig(
        num_layers=_LAYERS,
        hidden_size=_HIDDEN,
        num_attention_heads=_HEADS,
        attention_dropout=0.0,
        hidden_dropout=0.0,
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
    gpt = provide(gpt_config)
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

    Returns:
        prompts with their answers, ``[b, PROMPT + DIGITS]``, and the log-probabilities of what it wrote,
        ``[b, DIGITS]``.
    """
    (chunk,) = model
    chunk.eval()
    tokens_bs, log_probs = prompts_bp, []
    for _ in range(DIGITS):
        logits_bv = chunk(tokens_bs, positions(tokens_bs), attention_mask=None)[:, -1].float()
        log_probs_bv = logits_bv.log_softmax(dim=-1)
        token_b1 = torch.multinomial(log_probs_bv.exp(), 1, generator=generator)
        log_probs.append(log_probs_bv.gather(1, token_b1))
        tokens_bs = torch.cat([tokens_bs, token_b1], dim=1)
    return tokens_bs, torch.cat(log_probs, dim=1)


def positions(tokens_bs: torch.Tensor) -> torch.Tensor:
    """``position_ids`` of the tokens."""
    return torch.arange(tokens_bs.shape[1], device=tokens_bs.device).expand_as(tokens_bs)
