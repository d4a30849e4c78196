"""Bytes by rules, on small modules without data; and parameters of published models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference import estimate, estimate_memory, tables
from megatron_rl_patches.inference.estimate import (
    GPTDescription,
    OptimizerSettings,
    ParallelSizes,
    StageEstimate,
)
from megatron_rl_patches.inference.footprint import Memory

N = 128 * 128  # parameters of `linear`, a multiple of everything that pads
DISTRIBUTED = OptimizerSettings(use_distributed_optimizer=True)

GEMMA_3_27B = GPTDescription(  # google/gemma-3-27b-it, the language model
    num_layers=62,
    hidden_size=5376,
    ffn_hidden_size=21504,
    num_attention_heads=32,
    num_query_groups=16,
    kv_channels=128,
    vocab_size=262208,
    swiglu=True,
    add_bias_linear=False,
    qk_layernorm=True,
    normalization="RMSNorm",
)
DEEPSEEK_V3 = GPTDescription(  # deepseek-ai/DeepSeek-V3, without the layer for multi-token prediction
    num_layers=61,
    hidden_size=7168,
    ffn_hidden_size=18432,
    num_attention_heads=128,
    vocab_size=129280,
    untie_embeddings_and_output_weights=True,
    swiglu=True,
    add_bias_linear=False,
    qk_layernorm=True,
    normalization="RMSNorm",
    num_experts=256,
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
    moe_layer_freq=[0] * 3 + [1] * 58,
    multi_latent_attention=True,
    q_lora_rank=1536,
    kv_lora_rank=512,
)


def linear(dtype: torch.dtype = torch.bfloat16, expert: bool = False) -> torch.nn.Module:
    module = torch.nn.Linear(128, 128, bias=False, dtype=dtype, device="meta")
    module.weight.allreduce = not expert
    return module


def one_stage(model: Any, **arguments: Any) -> StageEstimate:
    [stage] = estimate_memory(model, **arguments).stages
    return stage


def test_a_config_with_experts_has_the_replicas_that_they_need() -> None:
    config = SimpleNamespace(
        tensor_model_parallel_size=2,
        context_parallel_size=1,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=8,
        expert_tensor_parallel_size=None,
    )
    assert ParallelSizes.from_config(config).data_parallel_size == 8
    assert ParallelSizes.from_config(object()) == ParallelSizes()


def test_one_virtual_stage_is_none() -> None:
    assert ParallelSizes(virtual_pipeline_model_parallel_size=1) == ParallelSizes()


class TestTraining:
    def test_bf16_as_megatron_lm_trains_it(self) -> None:
        memory = one_stage(linear()).training.device
        assert memory == Memory(
            parameters=2 * N, gradients=4 * N, main_parameters=4 * N, exp_avg=4 * N, exp_avg_sq=4 * N
        )
        assert memory.total == 18 * N

    def test_gradients_in_bf16_are_copied_for_adam(self) -> None:
        memory = one_stage(
            linear(), optimizer=OptimizerSettings(accumulate_allreduce_grads_in_fp32=False)
        ).training.device
        assert (memory.gradients, memory.main_gradients) == (2 * N, 4 * N)

    def test_fp16_gradients_stay_fp16_unless_asked(self) -> None:
        assert one_stage(linear(torch.float16)).training.device.gradients == 2 * N

    def test_fp32_parameters_are_their_own_main_parameters(self) -> None:
        for optimizer in (OptimizerSettings(), DISTRIBUTED):
            memory = one_stage(linear(torch.float32), optimizer=optimizer).training.device
            assert memory == Memory(parameters=4 * N, gradients=4 * N, exp_avg=4 * N, exp_avg_sq=4 * N)

    def test_distributed_optimizer_shares_adam_among_replicas(self) -> None:
        parallel = ParallelSizes(data_parallel_size=4, context_parallel_size=2)
        memory = one_stage(linear(), parallel=parallel, optimizer=DISTRIBUTED).training.device
        assert (memory.parameters, memory.gradients) == (2 * N, 4 * N)
        assert memory.main_parameters == memory.exp_avg == memory.exp_avg_sq == 4 * N / 8
        assert one_stage(linear(), parallel=parallel).training.device.exp_avg == 4 * N

    def test_experts_have_fewer_replicas(self) -> None:
        parallel = ParallelSizes(data_parallel_size=8, expert_model_parallel_size=4)
        stage = one_stage(linear(expert=True), parallel=parallel, optimizer=DISTRIBUTED)
        assert stage.training.device.exp_avg == 4 * N / 2
        assert (stage.dense_parameters, stage.expert_parameters) == (0, N)

    def test_distributed_optimizer_pads(self) -> None:
        bias = torch.nn.Linear(1, 10, dtype=torch.bfloat16, device="meta")  # 10 + 10 parameters
        assert one_stage(bias, optimizer=DISTRIBUTED).training.device.parameters == 2 * 128
        three = torch.nn.ModuleList(torch.nn.Linear(1, 10, bias=False, device="meta") for _ in range(3))
        # Each starts at a multiple of 64, and so the third ends at 138.
        assert one_stage(three, optimizer=DISTRIBUTED).training.device.parameters == 4 * 256
        many = ParallelSizes(data_parallel_size=3)
        assert one_stage(bias, parallel=many, optimizer=DISTRIBUTED).training.device.parameters == 2 * 3 * 128
        stage = one_stage(bias)
        assert stage.training.device.parameters == stage.inference_only.device.parameters == 2 * 20

    def test_dtypes_and_chunks_add_up(self) -> None:
        mixed = torch.nn.Sequential(linear(), linear(torch.float32))
        assert one_stage([mixed, linear()]).training.device.parameters == (2 + 4 + 2) * N


class TestPrecisionAwareOptimizer:
    def adam(self, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Memory:
        settings = {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True, **settings}
        return one_stage(linear(dtype), optimizer=OptimizerSettings(**settings)).training.device

    def test_only_the_bits_that_bf16_lacks(self) -> None:
        assert self.adam().main_parameters == 2 * N
        assert self.adam(store_param_remainders=False).main_parameters == 4 * N
        assert self.adam(torch.float16).main_parameters == 4 * N

    def test_dtypes_of_the_state(self) -> None:
        memory = self.adam(
            main_params_dtype="fp16", main_grads_dtype="bf16", exp_avg_dtype="bf16", exp_avg_sq_dtype="fp8"
        )
        assert memory == Memory(
            parameters=2 * N, gradients=2 * N, main_parameters=2 * N, exp_avg=2 * N, exp_avg_sq=N
        )

    def test_offloaded_it_leaves_nothing_twice(self) -> None:
        optimizer = OptimizerSettings(
            use_distributed_optimizer=True,
            use_precision_aware_optimizer=True,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=0.75,
        )
        footprint = one_stage(linear(), optimizer=optimizer).training
        assert footprint.device == Memory(
            parameters=2 * N, gradients=4 * N, main_parameters=N, exp_avg=N, exp_avg_sq=N
        )
        assert footprint.host == Memory(
            main_parameters=3 * N, main_gradients=3 * N, exp_avg=3 * N, exp_avg_sq=3 * N
        )


def test_offload_without_it_keeps_the_main_parameters_on_the_device_too() -> None:
    footprint = one_stage(linear(), optimizer=OptimizerSettings(optimizer_cpu_offload=True)).training
    assert footprint.device == Memory(parameters=2 * N, gradients=4 * N, main_parameters=4 * N)
    assert footprint.host.total == 16 * N


def test_a_pool_takes_one_model_on_the_device_and_all_on_the_host() -> None:
    stage = one_stage(linear(), teachers=3)
    assert stage.inference_only.device == Memory(parameters=2 * N)
    assert stage.with_teachers.device.total == stage.training.device.total + 2 * N
    assert stage.with_teachers.host == Memory(teachers=3 * 2 * N)
    assert one_stage(linear()).with_teachers == one_stage(linear()).training


class TestRealModels:
    def test_27b_on_one_gpu(self) -> None:
        stage = one_stage(GEMMA_3_27B)
        assert stage.dense_parameters == pytest.approx(27.0e9, rel=0.001)
        assert stage.inference_only.device.total == pytest.approx(54e9, rel=0.001)
        in_gb = {part: round(getattr(stage.training.device, part) / 1e9) for part in tables.PARTS}
        assert in_gb["parameters"] == 54
        assert in_gb["gradients"] == 108
        assert in_gb["main_parameters"] == 108
        assert in_gb["exp_avg"] + in_gb["exp_avg_sq"] == 216
        in_bf16 = OptimizerSettings(accumulate_allreduce_grads_in_fp32=False)
        memory = one_stage(GEMMA_3_27B, optimizer=in_bf16).training.device
        assert round(memory.gradients / 1e9) == 54
        assert not torch.distributed.is_initialized()

    @pytest.mark.slow
    def test_671b_over_128_ranks(self) -> None:
        parallel = ParallelSizes(
            pipeline_model_parallel_size=4,
            decoder_last_pipeline_num_layers=13,
            expert_model_parallel_size=32,
            data_parallel_size=32,
        )
        stages = estimate_memory(DEEPSEEK_V3, parallel=parallel, optimizer=DISTRIBUTED).stages
        total = sum(stage.dense_parameters + 32 * stage.expert_parameters for stage in stages)
        assert total == pytest.approx(671e9, rel=0.001)
        assert [stage.stage for stage in stages] == [0, 1, 2, 3]

    def test_megatrons_objections_are_passed_on(self) -> None:
        odd = GPTDescription(num_layers=2, hidden_size=96, num_attention_heads=3, vocab_size=100)
        with pytest.raises(InvalidInputError, match="num_attention_heads"):
            estimate_memory(odd, parallel=ParallelSizes(tensor_model_parallel_size=2))


@pytest.mark.filterwarnings("ignore::UserWarning:megatron")
def test_a_transformer_config_brings_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer import TransformerConfig

    asked: list[Any] = []
    monkeypatch.setattr(estimate, "count_parameters", lambda *question: asked.append(question) or [])
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        add_bias_linear=False,
        bias_activation_fusion=False,
        gated_linear_unit=True,
        num_moe_experts=4,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.bfloat16,
    )
    estimate_memory(config, vocab_size=100, untie_embeddings_and_output_weights=True)
    [(description, sizes, dtype)] = asked
    assert (description.num_layers, description.ffn_hidden_size, description.vocab_size) == (2, 256, 100)
    assert description.swiglu and description.num_experts == 4
    assert description.untie_embeddings_and_output_weights
    assert sizes == ParallelSizes(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, expert_tensor_parallel_size=2
    )
    assert dtype == "bf16"

    with pytest.raises(InvalidInputError, match="vocab_size"):
        estimate_memory(config)
    config.mtp_num_layers = 1
    with pytest.raises(InvalidInputError, match="mtp_num_layers"):
        estimate_memory(config, vocab_size=100)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: OptimizerSettings(exp_avg_dtype="bf16"), "exp_avg_dtype: needs use_precision_aware"),
        (lambda: OptimizerSettings(use_precision_aware_optimizer=True), "needs use_distributed_optimizer"),
        (lambda: OptimizerSettings(main_grads_dtype="int8"), "main_grads_dtype is 'int8'"),
        (
            lambda: OptimizerSettings(optimizer_cpu_offload=True, optimizer_offload_fraction=2),
            "between 0 and 1",
        ),
        (lambda: OptimizerSettings(optimizer_offload_fraction=0.5), "needs optimizer_cpu_offload"),
        (
            lambda: OptimizerSettings(
                use_distributed_optimizer=True,
                use_precision_aware_optimizer=True,
                optimizer_cpu_offload=True,
                exp_avg_dtype="bf16",
            ),
            "exp_avg_dtype: without effect with optimizer_cpu_offload",
        ),
        (lambda: OptimizerSettings(main_grads_dtype="fp8"), "it can be fp32, bf16, as in Megatron-LM"),
        (lambda: OptimizerSettings(main_params_dtype="bf16"), "it can be fp32, fp16, as in Megatron-LM"),
        (lambda: GPTDescription(1, 1, 1, 1, normalization="Foo"), "normalization is 'Foo'"),
        (lambda: GPTDescription(1, 1, 1, 1, moe_layer_freq=0), "moe_layer_freq is 0"),
        (lambda: GPTDescription(1, 1, 1, 1, moe_layer_freq=[0, 2]), r"moe_layer_freq is \(0, 2\)"),
        (lambda: estimate_memory(linear(torch.float8_e5m2)), "parameters of dtype float8_e5m2"),
        (lambda: ParallelSizes(tensor_model_parallel_size=0), "tensor_model_parallel_size is 0"),
        (lambda: ParallelSizes(expert_model_parallel_size=8), "must be a multiple of 8"),
        (lambda: GPTDescription(0, 1, 1, 1), "num_layers is 0"),
        (lambda: estimate_memory(linear(), dtype="fp64"), "dtype is 'fp64'"),
        (lambda: estimate_memory(linear(), teachers=-1), "teachers is -1"),
        (lambda: estimate_memory(linear(), vocab_size=3), "only a TransformerConfig"),
        (lambda: estimate_memory("gpt"), "model is a str"),
    ],
)
def test_mistakes(mistake: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        mistake()


class TestTables:
    def test_units_fit_the_size(self) -> None:
        header, training, inference = tables.rows(estimate_memory(linear()))
        assert header[:4] == ("stage", "use", "where", "parameters (kB)")
        assert training[-2:] == (f"{18 * N / 1000:.2f}", f"{18 * N / 1024:.2f}")
        assert inference[1:5] == ("inference-only", "device", f"{2 * N / 1000:.2f}", "-")

    def test_decimal_and_binary(self) -> None:
        assert tables.size(54_018_047_488) == "54.02 GB (50.31 GiB)"
        assert tables.size(5) == "5.00 B (5.00 B)"

    def test_host_rows_only_where_something_is(self) -> None:
        rows = tables.rows(estimate_memory(linear(), teachers=2))
        assert [row[1:3] for row in rows[1:]] == [
            ("training", "device"),
            ("inference-only", "device"),
            ("training + 2 teachers", "device"),
            ("training + 2 teachers", "host"),
        ]

    def test_summary_names_the_worst_stage(self) -> None:
        assert "stage 0 takes most" in tables.summary(estimate_memory(linear()))
        assert "88.9% less" in tables.summary(estimate_memory(linear()))

    def test_json_has_the_sums(self) -> None:
        [stage] = estimate_memory(linear(), teachers=1).as_dict()["stages"]
        assert stage["training"]["device"]["total"] == 18 * N
        assert stage["with_teachers"]["host"]["total"] == 2 * N
