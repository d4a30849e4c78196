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
            for part, real, estimated in memory_cases.parts_of(account.training, expected):
                assert real == one_percent(estimated), (case.name, part)
            assert account.live_training == one_percent(expected.total), case.name
            assert account.live_inference == one_percent(stage.inference_only.total), case.name
            [of_chunks] = account.from_chunks.stages
            assert of_chunks.training == stage.training, case.name
            assert of_chunks.inference_only == stage.inference_only, case.name


def one_percent(number: int) -> Any:
    return pytest.approx(number, rel=0.01)


# --- pipelines whose stages have different numbers of layers

SPLITS: dict[str, dict[str, Any]] = {
    "first": {"num_layers": 6, "num_layers_in_first_pipeline_stage": 2},
    "last, VPP 2": {
        "num_layers": 6,
        "num_layers_in_last_pipeline_stage": 2,
        "virtual_pipeline_model_parallel_size": 2,
    },
    "embedding": {"num_layers": 5, "account_for_embedding_in_pipeline_split": True},
    "loss, VPP 2": {
        "num_layers": 7,
        "account_for_loss_in_pipeline_split": True,
        "virtual_pipeline_model_parallel_size": 2,
    },
    "layout, VPP 2": {"num_layers": 4, "pipeline_model_parallel_layout": "E|tt|t|tL"},
    "layout as a list": {
        "num_layers": 3,
        "pipeline_model_parallel_layout": [["embedding", "decoder"], ["decoder", "decoder", "loss"]],
    },
}


@pytest.mark.slow
@on_ranks(2)
def test_uneven_pipelines() -> None:
    """This pipeline rank has as many parameters as estimated, as Megatron-LM builds a model."""
    for name, split in SPLITS.items():
        config = TransformerConfig(
            hidden_size=64,
            num_attention_heads=4,
            pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float32,
            # An uneven pipeline mixes dense layers and experts, which are not of one size.
            num_moe_experts=2,
            moe_ffn_hidden_size=128,
            moe_layer_freq=2,
            add_bias_linear=False,
            **split,
        )
        stages = config.virtual_pipeline_model_parallel_size
        TinyModel(pp=2, vpp=stages, seed=1).initialize()
        count = sum(_parameters_of(config, stage) for stage in (range(stages) if stages else [None]))
        estimate = estimate_memory(config, vocab_size=1024) if dist.get_rank() == 0 else None
        stage = everywhere(estimate)[0].stages[parallel_state.get_pipeline_model_parallel_rank()]
        assert stage.dense_parameters + stage.expert_parameters == count, name


@pytest.mark.slow
@pytest.mark.parametrize("experts", [1, 2])
@on_ranks(2)
def test_expert_tensor_parallelism(experts: int) -> None:
    """The experts of TP 2 are whole on each rank with expert TP 1, spread over EP 1 or 2."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        tensor_model_parallel_size=2,
        expert_model_parallel_size=experts,
        expert_tensor_parallel_size=1,
        num_moe_experts=4,
        moe_ffn_hidden_size=128,
        add_bias_linear=False,
    )
    # initialize() of the tiny model, which also seeds, has no size for the tensor-parallel group of experts.
    TinyModel(tp=2, seed=1).initialize()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        2, expert_model_parallel_size=experts, expert_tensor_parallel_size=1, create_gloo_process_groups=False
    )
    count = _parameters_of(config, None)
    estimate = estimate_memory(config, vocab_size=1024) if dist.get_rank() == 0 else None
    [stage] = everywhere(estimate)[0].stages
    assert stage.dense_parameters + stage.expert_parameters == count


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
