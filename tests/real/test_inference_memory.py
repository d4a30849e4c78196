"""The estimate against real bytes on real megatron-core: within one percent, part by part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig

from megatron_rl_patches.inference.memory.estimate import OptimizerSettings, estimate_memory
from megatron_rl_patches.testing import TinyModel
from tests.ranks import everywhere, on_ranks
from tests.references import memory_cases
from tests.references.memory_cases import EXPERTS, TIED, Case

PLAIN = OptimizerSettings()
BF16_GRADIENTS = OptimizerSettings(use_distributed_optimizer=True, accumulate_allreduce_grads_in_fp32=False)

CASES = [
    Case("bf16"),
    Case("bf16, bf16 gradients", optimizer=BF16_GRADIENTS),
    Case("bf16, plain optimizer", optimizer=PLAIN),
    Case("fp32", dtype="fp32"),
    Case("fp32, plain optimizer", dtype="fp32", optimizer=PLAIN),
    Case("DP 2", optimizer=BF16_GRADIENTS, dp=2),
    Case("PP 2", TIED, pp=2),
    Case("EP 2", EXPERTS, ep=2, dp=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_estimate_is_what_is_live(ranks: int) -> None:
    cases = [case for case in CASES if case.world_size == ranks]
    measured = memory_cases.measure(cases)
    for case in cases:
        estimate = case.estimate()
        for account in measured[case.name]:
            stage = estimate.stages[account.rank if len(estimate.stages) > 1 else 0]
            expected = stage.training
            numbers = [
                *memory_cases.parts_of(account.training, expected),
                ("training", account.live_training, expected.total),
                ("inference", account.live_inference, stage.inference_only.total),
            ]
            for part, real, estimated in numbers:
                assert real == pytest.approx(estimated, rel=0.01), (case.name, part)
            [of_chunks] = account.from_chunks.stages
            assert of_chunks.training == stage.training, case.name
            assert of_chunks.inference_only == stage.inference_only, case.name


MOE = {"hidden_size": 64, "num_attention_heads": 4, "moe_ffn_hidden_size": 128, "add_bias_linear": False}
# An uneven pipeline mixes dense layers and experts, which are not of one size.
UNEVEN = {"num_moe_experts": 2, "moe_layer_freq": 2, "pipeline_model_parallel_size": 2}
VPP = {**UNEVEN, "virtual_pipeline_model_parallel_size": 2}
AS_A_LIST = [["embedding", "decoder"], ["decoder", "decoder", "loss"]]
EXPERT_TP = {"num_moe_experts": 4, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "first": {**UNEVEN, "num_layers": 6, "num_layers_in_first_pipeline_stage": 2},
    "last, VPP 2": {**VPP, "num_layers": 6, "num_layers_in_last_pipeline_stage": 2},
    "embedding": {**UNEVEN, "num_layers": 5, "account_for_embedding_in_pipeline_split": True},
    "loss, VPP 2": {**VPP, "num_layers": 7, "account_for_loss_in_pipeline_split": True},
    "layout, VPP 2": {**VPP, "num_layers": 4, "pipeline_model_parallel_layout": "E|tt|t|tL"},
    "layout as a list": {**UNEVEN, "num_layers": 3, "pipeline_model_parallel_layout": AS_A_LIST},
    # The experts of TP 2 are whole on each rank with expert TP 1, spread over EP 1 or 2.
    "expert TP 1, EP 1": {**EXPERT_TP, "num_layers": 2, "expert_model_parallel_size": 1},
    "expert TP 1, EP 2": {**EXPERT_TP, "num_layers": 2, "expert_model_parallel_size": 2},
}


@pytest.mark.slow
@on_ranks(2)
def test_a_rank_has_as_many_parameters_as_estimated() -> None:
    """As Megatron-LM builds a model."""
    TinyModel(seed=1).initialize()
    for name, shape in SHAPES.items():
        config = TransformerConfig(**MOE, **shape, pipeline_dtype=torch.float32)
        stages = config.virtual_pipeline_model_parallel_size
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            config.tensor_model_parallel_size,
            config.pipeline_model_parallel_size,
            stages,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        count = sum(_parameters_of(config, stage) for stage in (range(stages) if stages else [None]))
        estimate = estimate_memory(config, vocab_size=1024) if dist.get_rank() == 0 else None
        stage = everywhere(estimate)[0].stages[parallel_state.get_pipeline_model_parallel_rank()]
        assert stage.dense_parameters + stage.expert_parameters == count, name


def _parameters_of(config: TransformerConfig, stage: int | None) -> int:
    where = {"ignore_virtual": False, "vp_stage": stage}
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage),
        vocab_size=1024,
        max_sequence_length=1,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=True,
        vp_stage=stage,
    )
    return sum(parameter.numel() for parameter in model.parameters())
