"""The task, which is to sort a row of digits, and a small Megatron GPT that answers, with its optimizer.

A prompt is ``DIGITS`` random digits between two tokens that stand for an order; its answer is the same digits
in that order. A checker scores every answer, so no reward model is needed.
"""

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

#: ``tokens`` [b, s]. For the policy loss also ``advantages`` and, under the policy that wrote the answers,
#: ``log_probs``, [b, DIGITS]. For distillation also ``teachers``, a distribution for each answer.
Batch = dict[str, Any]

DIGITS = 5
PROMPT = DIGITS + 2
LENGTH = PROMPT + DIGITS
ORDERS = ("ascending", "descending")
VOCABULARY = 10 + len(ORDERS)
_LEARNING_RATE = 1e-3
# Parameters per bucket. With a single bucket no communication would overlap with computation.
_BUCKET = 25_000


# --- the task


def prompts(count: int, generator: torch.Generator, order: str | None = None) -> torch.Tensor:
    """Return random prompts, ``[count, PROMPT]``, of one order or of all."""
    device = generator.device
    digits_bd = torch.randint(10, (count, DIGITS), generator=generator, device=device)
    orders = ORDERS if order is None else (order,)
    first = 10 + ORDERS.index(orders[0])
    order_b1 = torch.randint(first, first + len(orders), (count, 1), generator=generator, device=device)
    return torch.cat([order_b1, digits_bd, order_b1], dim=1)


def order_of(tokens_bs: torch.Tensor) -> torch.Tensor:
    """Return the order of each prompt as an index into ``ORDERS``, ``[b]``."""
    return tokens_bs[:, 0] - 10


def solve(prompts_bp: torch.Tensor) -> torch.Tensor:
    """Return the right answers, ``[b, DIGITS]``."""
    ascending_bd = prompts_bp[:, 1:-1].sort(dim=1).values
    return torch.where(order_of(prompts_bp)[:, None] == 0, ascending_bd, ascending_bd.flip(1))


def score(tokens_bs: torch.Tensor) -> torch.Tensor:
    """Check answers: 1.0 for each right digit, 0.0 for each wrong one, ``[b, DIGITS]``."""
    return (tokens_bs[:, PROMPT:] == solve(tokens_bs[:, :PROMPT])).float()


# --- the model


def initialize(
    seed: int, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1, context_parallel_size: int = 1
) -> None:
    """Initialize Megatron's process groups and random number generators."""
    parallel_state.initialize_model_parallel(
        tensor_parallel_size,
        pipeline_parallel_size,
        context_parallel_size=context_parallel_size,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def make_generator(model: list[DistributedDataParallel], seed: int) -> torch.Generator:
    """Return a generator for prompts and sampling; ranks of the same replica have the same."""
    replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    return torch.Generator(next(model[0].parameters()).device).manual_seed(seed * replicas + replica)


def config() -> TransformerConfig:
    """Return the configuration of the model for the current parallel sizes."""
    return TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=True,
    )


def provide(config: TransformerConfig, pre_process: bool = True, post_process: bool = True) -> GPTModel:
    """Build the part of the model for a pipeline stage, as a Megatron model provider does."""
    return GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, pre_process, post_process)


def build(seed: int) -> tuple[list[DistributedDataParallel], Any]:
    """Return model chunks, as Megatron's ``get_model`` does, and their optimizer."""
    torch.manual_seed(seed)
    gpt_config, overlapped = config(), {"use_distributed_optimizer": True, "overlap_param_gather": True}
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=_BUCKET, **overlapped)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = [DistributedDataParallel(gpt_config, ddp_config, provide(gpt_config, first, last).cuda())]
    model[0].broadcast_params()
    optimizer_config = OptimizerConfig(optimizer="adam", lr=_LEARNING_RATE, weight_decay=0.0, **overlapped)
    return model, get_megatron_optimizer(optimizer_config, model, use_gloo_process_groups=False)


@torch.no_grad()
def answer(
    model: Sequence[Any], prompts_bp: torch.Tensor, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer prompts; return prompts with answers, ``[b, LENGTH]``, and their log-probs, ``[b, DIGITS]``.

    All ranks of a replica get the same answers. ``generator``, in the same state on all of them, samples at
    temperature 1; ``None`` always takes the most probable token.
    """
    count, device = len(prompts_bp), prompts_bp.device
    tokens_bs = prompts_bp.new_zeros(count, LENGTH)
    tokens_bs[:, :PROMPT] = prompts_bp
    log_probs_bd = torch.empty(count, DIGITS, device=device)
    for number in range(DIGITS):
        # The most probable token after division by exponential noise is a sample.
        noise_bv = torch.ones(count, VOCABULARY, device=device)
        if generator is not None:  # on all ranks of a replica, so that their generators stay in step
            noise_bv.exponential_(generator=generator)
        # The last token is a placeholder: it stands for the distribution from which it comes.
        distributions = topk(model, microbatch(tokens_bs, PROMPT + number + 1, 1), VOCABULARY)
        if distributions is not None:
            vocabulary = TopKDistribution.cat(distributions)
            choice_b1 = (vocabulary.log_probs.exp() / noise_bv).argmax(1, keepdim=True)
            tokens_bs[:, PROMPT + number] = vocabulary.indices.gather(1, choice_b1)[:, 0]
            log_probs_bd[:, number] = vocabulary.log_probs.gather(1, choice_b1)[:, 0]
        broadcast_from_last_stage(tokens_bs)
    return tokens_bs, broadcast_from_last_stage(log_probs_bd)


def microbatch(tokens_bs: torch.Tensor, length: int = LENGTH, response_length: int = DIGITS) -> Batch:
    """Return prompts with answers as a microbatch for the scoring functions."""
    count = len(tokens_bs)
    return {"tokens": tokens_bs, "lengths": [length] * count, "response_lengths": [response_length] * count}


def topk(
    model: Sequence[Any], batch: Batch, k: int | None = None, at: list[TopKDistribution] | None = None
) -> list[TopKDistribution] | None:
    """Return the distributions of the answers' tokens on the last pipeline stage."""
    return forward_topk(model, [batch], k, at=at, output_device=batch["tokens"].device, progress=False)


def broadcast_from_last_stage(values: torch.Tensor) -> torch.Tensor:
    """Overwrite ``values`` on all pipeline stages with those of the last stage, and return them."""
    last_rank = parallel_state.get_pipeline_model_parallel_last_rank()
    torch.distributed.broadcast(values, last_rank, parallel_state.get_pipeline_model_parallel_group())
    return values


def mean_over_ranks(*values: torch.Tensor) -> list[float]:
    """Average each scalar over all ranks."""
    total = torch.stack(values)
    torch.distributed.all_reduce(total)
    return (total / torch.distributed.get_world_size()).tolist()
