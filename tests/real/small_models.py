"""Small GPTs on real megatron-core in several layouts, as frameworks build them.

Call these inside ``cpu_backend()`` on a rank with ``torch.distributed`` initialized.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    tied: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.ep


LAYOUTS = {
    "1 rank": Layout(),
    "1 rank, tied embeddings": Layout(tied=True),
    "TP 2": Layout(tp=2),
    "PP 2, tied embeddings": Layout(pp=2, tied=True),
    "PP 2, VPP 2": Layout(pp=2, vpp=2),
    "CP 2": Layout(cp=2),
    "EP 2, MoE": Layout(ep=2),
}


def by_speed(layouts: Iterable[str], fast: Collection[str]) -> list[Any]:
    """Names of layouts for ``parametrize``: all but the fast ones are slow tests."""
    return [pytest.param(name, marks=[] if name in fast else pytest.mark.slow) for name in layouts]


def initialize(layout: Layout) -> None:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(7)


def transformer_config(layout: Layout, dtype: str) -> Any:
    import torch
    from megatron.core.transformer import TransformerConfig

    from tests.real import tiny_gpt

    torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    experts = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_token_dispatcher_type": "allgather",
        "add_bias_linear": False,
    }
    return TransformerConfig(
        num_layers=tiny_gpt.LAYERS,
        hidden_size=tiny_gpt.HIDDEN,
        num_attention_heads=tiny_gpt.HEADS,
        # The attention that stands in for context parallelism does not know query groups.
        num_query_groups=tiny_gpt.HEADS if layout.cp > 1 else 2,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        bf16=dtype == "bf16",
        params_dtype=torch_dtype,
        pipeline_dtype=torch_dtype,
        overlap_p2p_comm=layout.vpp is not None,
        batch_p2p_comm=layout.vpp is None,
        **(experts if layout.ep > 1 else {}),
    )


def model_provider(layout: Layout) -> Callable[..., Any]:
    """As a user writes it who knows the installed release; Megatron's ``get_model`` could call it too."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from tests.real import tiny_gpt

    def provider(
        pre_process: bool = True, post_process: bool = True, config: Any = None, **stage: Any
    ) -> GPTModel:
        layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
        if layout.cp > 1:
            layer.submodules.self_attention.submodules.core_attention = tiny_gpt.GatheredAttention
        return GPTModel(
            config,
            layer,
            vocab_size=tiny_gpt.VOCABULARY,
            max_sequence_length=tiny_gpt.SEQUENCE,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=layout.tied,
            **stage,
        )

    return provider


def get_model(provider: Callable[..., Any], config: Any, layout: Layout) -> list[Any]:
    """What ``get_model(..., wrap_with_ddp=False)`` of every release comes to, initialized for real."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.module import Float16Module

    rank, chunks = parallel_state.get_pipeline_model_parallel_rank(), []
    by_argument = "vp_stage" in parallel_state.is_pipeline_first_stage.__code__.co_varnames
    for stage in range(layout.vpp or 1):
        numbered = {"vp_stage": stage} if layout.vpp and by_argument else {}
        if layout.vpp and not by_argument:
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        chunk = provider(
            pre_process=rank == 0 and stage == 0,
            post_process=rank == layout.pp - 1 and stage == (layout.vpp or 1) - 1,
            config=config,
            **numbered,
        )
        if layout.vpp:
            chunk.vp_stage = stage
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(Float16Module(config, chunk) if config.bf16 else chunk)
    return chunks


def in_ddp(chunks: list[Any], config: Any) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True)
    return [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]


def random_streams() -> list[Any]:
    import numpy as np
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracked = get_cuda_rng_tracker().get_states()
    return [
        random.getstate(),
        str(np.random.get_state()),
        torch.get_rng_state().tolist(),
        {name: state.tolist() for name, state in tracked.items()},
    ]


def sharding(chunk: Any) -> dict[str, Any]:
    described = ("key", "dtype", "local_shape", "global_shape", "global_offset", "replica_id")
    return {
        name: [str(getattr(entry, attribute, None)) for attribute in described]
        for name, entry in chunk.sharded_state_dict().items()
    }


def described_parameters(chunk: Any) -> dict[str, Any]:
    return {name: (p.dtype, p.shape, dict(vars(p))) for name, p in chunk.named_parameters()}


def outputs_of(model: list[Any]) -> list[Any]:
    """Loss of every token of three microbatches, by the schedule that Megatron chooses; on the last stage."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.real import tiny_gpt

    def forward_step(data: Iterator[Any], chunk: Any) -> Any:
        output, _ = tiny_gpt.forward_step(data, chunk)
        return output, lambda output, non_loss_data: output

    for chunk in model:
        chunk.eval()
    with torch.no_grad():
        outputs: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[tiny_gpt.SyntheticData() for _ in model],
            model=model,
            num_microbatches=4,
            seq_length=tiny_gpt.SEQUENCE // _context_parallel_size(),
            micro_batch_size=tiny_gpt.BATCH,
            forward_only=True,
            collect_non_loss_data=True,
        )
    return outputs


def _context_parallel_size() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_world_size()
