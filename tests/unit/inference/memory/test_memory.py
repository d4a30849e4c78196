"""Published models in Megatron's terms, their parameters, bytes by rules, and the report of what is used."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from pytest import MonkeyPatch

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference import estimate_memory, memory_report
from megatron_rl_patches.inference.memory import report
from megatron_rl_patches.inference.memory.estimate import Memory, OptimizerSettings, StageEstimate
from megatron_rl_patches.inference.memory.huggingface import fields_from_hf_config


def dense(model_type: str, *sizes: int, **more: Any) -> dict[str, Any]:
    """Return layers, hidden size, that of the MLP, heads, groups of queries and vocabulary, and more."""
    heads = "num_attention_heads", "num_key_value_heads"
    names = "num_hidden_layers", "hidden_size", "intermediate_size", *heads, "vocab_size"
    known = {"model_type": model_type, "tie_word_embeddings": False}
    return {**known, **dict(zip(names, sizes, strict=True)), **more}


def routed(experts: int, ffn: int, shared: int, first_dense: int) -> dict[str, Any]:
    """Return what DeepSeek and GLM say of their experts."""
    sizes = {"n_routed_experts": experts, "n_shared_experts": shared, "moe_intermediate_size": ffn}
    return sizes | {"first_k_dense_replace": first_dense}


def sparse(experts: int, ffn: int, **more: Any) -> dict[str, Any]:
    """Return what Qwen says of its experts."""
    return {"num_experts": experts, "moe_intermediate_size": ffn, "decoder_sparse_step": 1, **more}


def latent(q_lora_rank: int | None) -> dict[str, Any]:
    heads = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return {"q_lora_rank": q_lora_rank, "kv_lora_rank": 512, **heads}


LLAMA = dense("llama", 32, 4096, 14336, 32, 8, 128256, attention_bias=False)  # Llama-3.1-8B
QWEN3_MOE = dense("qwen3_moe", 48, 2048, 6144, 32, 4, 151936, head_dim=128, attention_bias=False)
QWEN3_MOE |= sparse(128, 768, mlp_only_layers=[])  # Qwen3-30B-A3B
DEEPSEEK_V3 = dense("deepseek_v3", 61, 7168, 18432, 128, 128, 129280) | latent(1536) | routed(256, 2048, 1, 3)
QWEN3_NEXT = dense("qwen3_next", 48, 2048, 5120, 16, 2, 151936, head_dim=256, attention_bias=False)
QWEN3_NEXT |= sparse(512, 512, shared_expert_intermediate_size=512, full_attention_interval=4)
QWEN3_NEXT |= {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
QWEN3_NEXT |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
GLM_AIR = dense("glm4_moe", 46, 4096, 10944, 96, 8, 151552, head_dim=128, attention_bias=True)
GLM_AIR |= routed(128, 1408, 1, 1) | {"use_qk_norm": False}
QWEN_MOE = dense("qwen2_moe", 24, 2048, 5632, 16, 16, 151936)
QWEN_MOE |= sparse(60, 1408, shared_expert_intermediate_size=5632)
DEEPSEEK_LITE = dense("deepseek_v2", 27, 2048, 10944, 16, 16, 102400) | latent(None) | routed(64, 1408, 2, 1)
MISTRAL = dense("mistral", 40, 5120, 32768, 32, 8, 131072, head_dim=128)
GLM = dense("glm4", 40, 4096, 13696, 32, 2, 151552, head_dim=128, attention_bias=True)
GPT_OSS = dense("gpt_oss", 36, 2880, 2880, 64, 8, 201088, head_dim=64, attention_bias=True)
GPT_OSS |= {"num_local_experts": 128, "layer_types": ["sliding_attention", "full_attention"] * 18}
PHI = dense("phi3", 32, 3072, 8192, 32, 32, 32064, pad_token_id=32000)
#: Parameters as transformers counts them on the meta device; docs/memory.md shows most of them.
MODELS = {
    "GLM-4-9B-0414": (GLM, 9_400_279_040 - 40 * 2 * 4096),  # without its two post-norms per layer
    "GLM-4.5-Air": (GLM_AIR, 106_852_245_504),
    "gpt-oss-120b": (GPT_OSS, 116_829_156_672),
    "Qwen1.5-MoE-A2.7B": (QWEN_MOE, 14_315_784_192),
    "DeepSeek-V3": (DEEPSEEK_V3, 671_026_404_352),
    "DeepSeek-V2-Lite": (DEEPSEEK_LITE, 15_706_484_224),
    "Phi-3-mini-4k": (PHI, 3_821_079_552),
    "Qwen3-Next-80B-A3B": (QWEN3_NEXT, 79_674_391_296),
    "Llama-3.1-8B": (LLAMA, 8_030_261_248),
    "Mixtral-8x7B": (dense("mixtral", 32, 4096, 14336, 32, 8, 32000, num_local_experts=8), 46_702_792_704),
    "Qwen3-30B-A3B": (QWEN3_MOE, 30_532_122_624),
    "Mistral-Small-3.1-24B": ({"model_type": "mistral3", "text_config": MISTRAL}, 23_572_403_200),
}


def test_layers_that_the_configuration_makes_dense_or_adds_for_multi_token_prediction() -> None:
    sparse = {**QWEN3_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert fields_from_hf_config(sparse)["moe_layer_freq"] == [0, 1, 0, 0]
    published = DEEPSEEK_V3 | {"num_nextn_predict_layers": 1}
    assert fields_from_hf_config(published)["mtp_num_layers"] == 1
    assert fields_from_hf_config(published, mtp_num_layers=0)["mtp_num_layers"] == 0
    without = fields_from_hf_config(DEEPSEEK_V3 | {"num_nextn_predict_layers": 0})
    assert without == fields_from_hf_config(DEEPSEEK_V3)


def test_the_text_part_counts_and_flags_fill_in_or_come_first() -> None:
    # As published: sizes that are the library's defaults are left out.
    text = dense("gemma3_text", 62, 5376, 21504, 32, 16, 0, head_dim=128)
    del text["vocab_size"], text["tie_word_embeddings"]
    gemma = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    message = r"vocab_size \(--set vocab_size=...\) to the defaults of gemma3_text"
    with pytest.raises(InvalidInputError, match=message):
        fields_from_hf_config(gemma)
    model = fields_from_hf_config(gemma, vocab_size=262208)
    assert (model["hidden_size"], model["vocab_size"], model["kv_channels"]) == (5376, 262208, 128)
    assert model["qk_layernorm"] and model["share_embeddings_and_output_weights"]
    # Flags come first.
    assert fields_from_hf_config(LLAMA, num_layers=2)["num_layers"] == 2
    assert len(fields_from_hf_config(QWEN3_MOE, num_layers=2)["moe_layer_freq"]) == 2
    assert fields_from_hf_config({**LLAMA, "text_config": None}) == fields_from_hf_config(LLAMA)


@pytest.mark.parametrize("inside", [{}, {"tie_word_embeddings": None, "model_type": None}])
def test_null_in_the_text_part_hides_nothing_outside(inside: dict[str, Any], bridge: list[Any]) -> None:
    """By the table and by Megatron-Bridge."""
    text = {name: MISTRAL[name] for name in MISTRAL.keys() - {"tie_word_embeddings", "model_type"}} | inside
    outside = {"model_type": "mistral3", "text_config": text, "tie_word_embeddings": True}
    assert fields_from_hf_config(outside)["share_embeddings_and_output_weights"]
    own = {**outside, "text_config": text | {"tie_word_embeddings": False}}
    assert not fields_from_hf_config(own)["share_embeddings_and_output_weights"]
    assert [config.get("tie_word_embeddings") for config in bridge] == [True, False]


NOT_DESCRIBED: list[tuple[Any, str]] = [
    ({**LLAMA, "model_type": "bert"}, "model_type is 'bert'; known are deepseek_v2"),
    ([LLAMA], "a JSON object, not a list"),
    ({**LLAMA, "hidden_size": "64"}, "hidden_size is '64' in the configuration; expected a whole number"),
    ({**LLAMA, "mlp_bias": 0.0}, "mlp_bias is 0.0 in the configuration; expected true or false"),
    ({**QWEN3_MOE, "decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ({**QWEN3_MOE, "mlp_only_layers": 1}, "another type"),
    ({**LLAMA, "mlp_bias": True}, "mlp_bias"),
    ({**LLAMA, "attention_bias": True}, "attention_bias"),
    ({**LLAMA, "model_type": "qwen3", "layer_types": ["linear"] * 32}, "linear: Megatron's GPTModel has"),
    ({**LLAMA, "model_type": "qwen3"}, r"head_dim \(--set kv_channels=...\)"),
]


def test_bad_values_of_any_field_are_refused_by_name() -> None:
    """Fields are made or refused; nothing else is raised, whatever a field holds."""
    for config in (LLAMA, QWEN3_MOE, DEEPSEEK_V3, {**QWEN3_MOE, "model_type": "qwen3_next"}):
        for name in [*config, "full_attention_interval", "layer_types", "num_nextn_predict_layers"]:
            for value in (0, -1, 2**70, math.nan, math.inf, 1.5, "x", [], {}, [None], True, None):
                with suppress(InvalidInputError):
                    fields_from_hf_config({**config, name: value})


@pytest.fixture
def bridge(monkeypatch: MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in in the shape of Megatron-Bridge; return the configurations that it is asked for."""
    from megatron.core.transformer import TransformerConfig

    configs: list[dict[str, Any]] = []

    class Bridge:
        @classmethod
        def from_hf_config(cls, config: dict[str, Any]) -> Bridge:
            configs.append(config)
            if config["model_type"] != "llama":
                raise ValueError("not supported")
            return cls()

        def to_megatron_provider(self, load_weights: bool) -> Any:
            assert not load_weights
            config = TransformerConfig(num_layers=3, hidden_size=64, num_attention_heads=4)
            config.vocab_size, config.share_embeddings_and_output_weights = 100, False
            return config

    config_class = SimpleNamespace(for_model=lambda **text: text)
    monkeypatch.setitem(sys.modules, "megatron.bridge", SimpleNamespace(AutoBridge=Bridge))
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoConfig=config_class))
    return configs


@pytest.mark.filterwarnings("ignore::UserWarning:megatron")
@pytest.mark.usefixtures("bridge")
def test_megatron_bridge_translates_the_models_that_it_knows() -> None:
    """Its configs are a TransformerConfig and more."""
    model = fields_from_hf_config(LLAMA, vocab_size=200)
    assert (model["num_layers"], model["ffn_hidden_size"], model["vocab_size"]) == (3, 256, 200)
    assert not model["share_embeddings_and_output_weights"]
    assert fields_from_hf_config(QWEN3_MOE)["num_layers"] == 48


# --- parameters of real models


def one_stage(model: Any, **arguments: Any) -> StageEstimate:
    [stage] = estimate_memory(model, **arguments).stages
    return stage


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", MODELS)
def test_published_totals(name: str) -> None:
    """They are those of the stages of an uneven pipeline."""
    config, total = MODELS[name]
    sizes = {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 1}
    description = fields_from_hf_config(config, make_vocab_size_divisible_by=1, **sizes)
    experts = description.get("num_moe_experts", 1)
    first, last = estimate_memory(description, expert_model_parallel_size=experts).stages
    assert sum(one.dense_parameters + experts * one.expert_parameters for one in (first, last)) == total


@pytest.mark.usefixtures("one_process")
def test_multi_token_prediction_and_biases_of_routers() -> None:
    config = DEEPSEEK_V3 | {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    stage = one_stage(fields_from_hf_config(config))
    without = one_stage(fields_from_hf_config(config, mtp_num_layers=0))
    assert stage.inference_only == without.inference_only
    # It is one more layer with experts, a projection from twice the hidden size, and three norms.
    longer = one_stage(fields_from_hf_config(config, mtp_num_layers=0, num_layers=5))
    hidden = config["hidden_size"]
    assert stage.dense_parameters - longer.dense_parameters == 2 * hidden**2 + 3 * hidden
    assert stage.expert_parameters == longer.expert_parameters
    # One layer of four has experts: a bias and a counter for each of 256, the counter in bf16.
    weights = without.dense_parameters + without.expert_parameters
    assert without.inference_only.parameters == 2 * weights + 256 * (4 + 2)
    assert without.training.gradients == 4 * weights


MOE: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_moe_experts": 4}
#: Of a training run; it asks for packages that are not needed to count.
OF_A_GPU: dict[str, Any] = {
    **dict.fromkeys(("sequence_parallel", "bf16", "gradient_accumulation_fusion", "moe_grouped_gemm"), True),
    **dict.fromkeys(("persist_layer_norm", "variable_seq_lengths"), True),
    "params_dtype": torch.bfloat16,
    "moe_token_dispatcher_type": "alltoall",
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore::UserWarning:megatron")
def test_settings_of_a_gpu_do_not_change_the_parameters() -> None:
    from megatron.core.transformer import TransformerConfig

    shape = MOE | {"add_bias_linear": False, "normalization": "RMSNorm", "moe_ffn_hidden_size": 64}
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "pipeline_model_parallel_size": 2}
    config = TransformerConfig(**shape, **sizes, **OF_A_GPU, pipeline_dtype=torch.bfloat16)
    assert estimate_memory(config, vocab_size=100) == estimate_memory(shape, vocab_size=100, **sizes)


N = 128 * 128  # parameters of `linear`, a multiple of everything that pads
DISTRIBUTED = OptimizerSettings(use_distributed_optimizer=True)


def linear(dtype: torch.dtype = torch.bfloat16, expert: bool = False) -> torch.nn.Module:
    module = torch.nn.Linear(128, 128, bias=False, dtype=dtype, device="meta")
    module.weight.allreduce = not expert
    return module


#: Bytes per parameter: of the model and of Adam in the usual case, and what is different in others.
WEIGHTS = {"parameters": 2, "gradients": 4}
USUAL = {**WEIGHTS, "main_parameters": 4, "exp_avg": 4, "exp_avg_sq": 4}
COPIED = {"gradients": 2, "main_gradients": 4}
FP32 = {"parameters": 4, "main_parameters": 0}  # they are their own main parameters
AWARE = {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True}


@pytest.mark.parametrize(
    ("dtype", "settings", "device", "host"),
    [
        (torch.bfloat16, {}, USUAL, 0),
        (torch.bfloat16, {"accumulate_allreduce_grads_in_fp32": False}, USUAL | COPIED, 0),
        (torch.float16, {}, USUAL | COPIED, 0),
        (torch.float32, {}, USUAL | FP32, 0),
        (torch.float32, {"use_distributed_optimizer": True}, USUAL | FP32, 0),
        (torch.bfloat16, AWARE, USUAL | {"main_parameters": 2}, 0),
        (torch.bfloat16, {**AWARE, "optimizer_cpu_offload": True}, WEIGHTS, 16),
        (torch.bfloat16, {"optimizer_cpu_offload": True}, WEIGHTS | {"main_parameters": 4}, 16),
    ],
)
def test_bytes(dtype: torch.dtype, settings: dict[str, Any], device: dict[str, int], host: int) -> None:
    memory = one_stage(linear(dtype), optimizer=OptimizerSettings(**settings)).training
    assert memory == Memory(**{part: size * N for part, size in device.items()}, host=host * N)
    assert memory.total == sum(device.values()) * N


def test_distributed_optimizer_shares_adam_among_replicas() -> None:
    sizes = {"data_parallel_size": 4, "context_parallel_size": 2}
    memory = one_stage(linear(), **sizes, optimizer=DISTRIBUTED).training
    assert (memory.parameters, memory.gradients) == (2 * N, 4 * N)
    assert memory.main_parameters == memory.exp_avg == memory.exp_avg_sq == 4 * N / 8
    assert one_stage(linear(), **sizes).training.exp_avg == 4 * N


def test_experts_have_the_replicas_that_they_need() -> None:
    experts = linear(expert=True)
    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 8}
    assert one_stage(experts, **sizes) == one_stage(experts, data_parallel_size=8, **sizes)
    shared = one_stage(experts, optimizer=DISTRIBUTED, data_parallel_size=16, **sizes)
    assert shared.training.exp_avg == 4 * N / 2
    fewer = {"data_parallel_size": 8, "expert_model_parallel_size": 4}
    stage = one_stage(experts, **fewer, optimizer=DISTRIBUTED)
    assert stage.training.exp_avg == 4 * N / 2
    assert (stage.dense_parameters, stage.expert_parameters) == (0, N)


def test_distributed_optimizer_pads() -> None:
    bias = torch.nn.Linear(1, 10, dtype=torch.bfloat16, device="meta")  # 10 + 10 parameters
    assert one_stage(bias, optimizer=DISTRIBUTED).training.parameters == 2 * 128
    three = torch.nn.Sequential(*(torch.nn.Linear(1, 10, bias=False, device="meta") for _ in range(3)))
    # Each starts at a multiple of 64, and so the third ends at 138.
    assert one_stage(three, optimizer=DISTRIBUTED).training.parameters == 4 * 256


def test_dtypes_chunks_and_teachers_add_up() -> None:
    mixed = torch.nn.Sequential(linear(), linear(torch.float32))
    for chunks in ([mixed, linear()], torch.nn.ModuleList([mixed, linear()])):
        assert one_stage(chunks).training.parameters == (2 + 4 + 2) * N
    # A pool takes one model on the device and all on the host.
    stage = one_stage(linear(), teachers=3)
    assert stage.inference_only == Memory(parameters=2 * N)
    assert stage.with_teachers.total == stage.training.total + 2 * N
    assert stage.with_teachers.host == 3 * 2 * N
    assert one_stage(linear()).with_teachers == one_stage(linear()).training


SMALL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (SMALL | {"add_bias_linear": "False"}, "add_bias_linear is 'False'; expected a value such as True"),
        (SMALL | {"num_layers": True}, "num_layers is True; expected a value such as 0"),
        (SMALL | {"num_layers": 0}, "num_layers is 0; it must be at least 1"),
        (SMALL | {"ffn_hidden_size": -1}, "ffn_hidden_size is -1; it must be at least 0"),
        (SMALL | {"num_query_groups": 3}, "num_query_groups is 3; expected a divisor of num_attention_heads"),
        (SMALL | {"layers": 2}, "layers: TransformerConfig of this megatron-core has no such field"),
        ({"hidden_sise": 64}, "hidden_sise: .* no such field; did you mean hidden_size"),
        ({"vocab_size": 4}, "missing: num_layers, hidden_size"),
        (SMALL | {"tensor_model_parallel_size": 8}, "does not build this model: .*num_attention_heads"),
        (SMALL | {"num_layers": 5, "pipeline_model_parallel_size": 2}, "; num_layers_in_last_pipeline_stage"),
    ],
)
def test_objections_of_the_child_process(model: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        estimate_memory(model)
    assert not torch.distributed.is_initialized()


EP_8: dict[str, Any] = {"expert_model_parallel_size": 8}


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: OptimizerSettings(use_precision_aware_optimizer=True), "needs use_distributed_optimizer"),
        (lambda: OptimizerSettings(optimizer_cpu_offload="False"), "optimizer_cpu_offload is 'False'"),
        (lambda: estimate_memory(linear(torch.float8_e5m2)), "parameters of dtype torch.float8_e5m2"),
        (lambda: estimate_memory(linear(), data_parallel_size=0), "data_parallel_size is 0"),
        (lambda: estimate_memory(linear(), data_parallel_size=4, **EP_8), "must be a multiple of 8"),
        (lambda: estimate_memory(linear(), dtype="fp64"), "dtype is 'fp64'"),
        (lambda: estimate_memory(linear(), vocab_size=3), "vocab_size: model chunks take only the sizes"),
        (lambda: estimate_memory("gpt"), "model is a str"),
        *((partial(fields_from_hf_config, config), message) for config, message in NOT_DESCRIBED),
    ],
)
def test_mistakes(mistake: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        mistake()


def test_units_fit_the_size() -> None:
    header, parameters_row, *_, total, in_kib = report.rows(estimate_memory(linear()))
    assert header == ("kB", "training", "inference-only")
    assert parameters_row == ("parameters", f"{2 * N / 1000:.2f}", f"{2 * N / 1000:.2f}")
    assert total[:2] == ("total", f"{18 * N / 1000:.2f}")
    assert in_kib[:2] == ("total in KiB", f"{18 * N / 1024:.2f}")
    assert report.size(5) == "5.00 B (5.00 B)"
    assert "88.9% less" in report.summary(estimate_memory(linear()))


GIB = 2**30


def test_report(monkeypatch: MonkeyPatch) -> None:
    for is_available in (False, True):  # and no context
        monkeypatch.setattr(torch.cuda, "is_available", lambda value=is_available: value)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        host = memory_report()
        assert host.device is None and str(host).startswith("host: ")
    assert host.rss == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    assert 0 < host.host_available < host.host_total == psutil.virtual_memory().total
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: SimpleNamespace(rss=GIB))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * GIB, total=4 * GIB))
    for name, value in {"is_available": True, "is_initialized": True, "current_device": 1}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (6 * GIB, 80 * GIB))
    for name, value in {"memory_allocated": 2, "max_memory_allocated": 3, "memory_reserved": 5}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value * GIB)
    line = (
        "cuda:1: 2.00 GiB allocated, peak 3.00 GiB, 5.00 GiB reserved, 6.00 GiB of 80.00 GiB free; "
        "host: 1.00 GiB in this process, 2.00 GiB of 4.00 GiB free"
    )
    assert str(memory_report()) == line
    with_teachers = replace(memory_report(), teachers=2, teacher_weights=3 * GIB, teacher_heads=GIB)
    assert str(with_teachers) == f"{line}; 2 teachers: 3.00 GiB in host memory, output layers 1.00 GiB"
