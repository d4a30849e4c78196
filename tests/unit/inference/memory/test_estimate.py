"""Bytes by rules, on small modules without data, and the report of what is used, with a made-up GPU."""

from __future__ import annotations

import dataclasses
import json
import mmap
import re
from typing import Any

import psutil
import pytest
import torch
from pytest import MonkeyPatch

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference import estimate_memory, memory_report
from megatron_rl_patches.inference.memory import estimate, parameters, report
from megatron_rl_patches.inference.memory.estimate import Memory, OptimizerSettings, StageEstimate
from megatron_rl_patches.inference.memory.usage import DeviceMemory, HostMemory, MemoryReport, TeacherMemory

N = 128 * 128  # parameters of `linear`, a multiple of everything that pads
DISTRIBUTED = OptimizerSettings(use_distributed_optimizer=True)


def linear(dtype: torch.dtype = torch.bfloat16, expert: bool = False) -> torch.nn.Module:
    module = torch.nn.Linear(128, 128, bias=False, dtype=dtype, device="meta")
    module.weight.allreduce = not expert
    return module


def one_stage(model: Any, **arguments: Any) -> StageEstimate:
    [stage] = estimate_memory(model, **arguments).stages
    return stage


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
    three_replicas = one_stage(bias, data_parallel_size=3, optimizer=DISTRIBUTED)
    assert three_replicas.training.parameters == 2 * 3 * 128
    stage = one_stage(bias)
    assert stage.training.parameters == stage.inference_only.parameters == 2 * 20


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


@pytest.mark.usefixtures("one_process")
def test_objections_are_passed_on() -> None:
    model = {"num_layers": 2, "hidden_size": 96, "num_attention_heads": 3, "vocab_size": 100}
    with pytest.raises(InvalidInputError, match=r"does not build this model: .*num_attention_heads"):
        estimate_memory(model, tensor_model_parallel_size=2)
    with pytest.raises(InvalidInputError, match="num_layers is 0; it must"):
        estimate_memory(model, num_layers=0)
    assert not torch.distributed.is_initialized()


@pytest.mark.filterwarnings("ignore::UserWarning:megatron")
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("add_bias_linear", "False", "add_bias_linear is 'False'; expected bool"),
        ("num_layers", True, "num_layers is True; expected int"),
        ("num_layers", 0, "num_layers is 0; it must be at least 1"),
        ("ffn_hidden_size", -1, "ffn_hidden_size is -1; it must be at least 0"),
        ("num_query_groups", 3, "num_query_groups is 3; expected a divisor of num_attention_heads, 4"),
        ("moe_layer_freq", [[0]], "moe_layer_freq is "),
        ("layers", 2, "layers: TransformerConfig of this megatron-core has no such field"),
        ("softmax_type", "soft", "softmax_type is 'soft'"),
    ],
)
def test_bad_fields(field: str, value: object, message: str) -> None:
    """The checks of the child process, in this one."""
    model = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, field: value}
    with pytest.raises(InvalidInputError, match=re.escape(message)):
        list(parameters.stages({}, model, "bf16"))


MOE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_moe_experts": 4}


@pytest.mark.filterwarnings("ignore::UserWarning:megatron")
def test_a_transformer_config_brings_its_groups(monkeypatch: MonkeyPatch) -> None:
    from megatron.core.transformer import TransformerConfig

    calls: list[Any] = []
    monkeypatch.setattr(estimate, "count_parameters", lambda *arguments: calls.append(arguments) or [])
    layers = {"add_bias_linear": False, "bias_activation_fusion": False, "gated_linear_unit": True}
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    config = TransformerConfig(**MOE, **layers, **sizes, pipeline_dtype=torch.bfloat16)
    estimate_memory(config, vocab_size=100, share_embeddings_and_output_weights=False)
    [(fields, described, dtype)] = calls
    expected = {**MOE, "ffn_hidden_size": 256, "gated_linear_unit": True, "expert_tensor_parallel_size": 2}
    assert fields.items() >= expected.items()
    assert described == {"vocab_size": 100, "share_embeddings_and_output_weights": False}
    assert dtype == "bf16"


EP_8: dict[str, Any] = {"expert_model_parallel_size": 8}


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: OptimizerSettings(use_precision_aware_optimizer=True), "needs use_distributed_optimizer"),
        (lambda: OptimizerSettings(optimizer_cpu_offload="False"), "optimizer_cpu_offload is 'False'"),
        (lambda: estimate_memory(linear(torch.float8_e5m2)), "parameters of dtype torch.float8_e5m2"),
        (lambda: estimate_memory(linear(), data_parallel_size=0), "data_parallel_size is 0"),
        (lambda: estimate_memory(linear(), data_parallel_size=4, **EP_8), "must be a multiple of 8"),
        (lambda: estimate_memory({"num_layers": 2}, vocab_size=4), "missing: hidden_size, num_attention_h"),
        (lambda: estimate_memory(linear(), dtype="fp64"), "dtype is 'fp64'"),
        (lambda: estimate_memory(linear(), teachers=-1), "teachers is -1"),
        (lambda: estimate_memory(linear(), vocab_size=3), "vocab_size: model chunks take only the sizes"),
        (lambda: estimate_memory("gpt"), "model is a str"),
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
    assert report.size(54_018_047_488) == "54.02 GB (50.31 GiB)"
    assert report.size(5) == "5.00 B (5.00 B)"
    assert "88.9% less" in report.summary(estimate_memory(linear()))


GIB = 2**30


def test_host() -> None:
    size = 64 * 2**20
    before = memory_report().host
    with mmap.mmap(-1, size) as ballast:  # not from the heap, which may have pages to spare
        for page in range(0, size, mmap.PAGESIZE):
            ballast[page] = 1
        after = memory_report().host
    assert after.rss - before.rss == pytest.approx(size, rel=0.1)
    assert after.total == psutil.virtual_memory().total
    assert 0 < after.available < after.total


def test_device(monkeypatch: MonkeyPatch) -> None:
    for is_available in (False, True):  # and no context
        monkeypatch.setattr(torch.cuda, "is_available", lambda value=is_available: value)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        assert memory_report().device is None and str(memory_report()).startswith("host: ")
    for name, value in {"is_available": True, "is_initialized": True, "current_device": 1}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (index * GIB, 80 * GIB))
    for name, value in {"memory_allocated": 2, "max_memory_allocated": 3, "memory_reserved": 4}.items():
        monkeypatch.setattr(torch.cuda, name, lambda index, value=value: value * GIB)
    expected = DeviceMemory(1, 2 * GIB, 3 * GIB, 4 * GIB, free=1 * GIB, total=80 * GIB)
    assert memory_report().device == expected
    assert memory_report(5).device == dataclasses.replace(expected, index=5, free=5 * GIB)


def test_one_line_and_json() -> None:
    host = HostMemory(rss=GIB, available=2 * GIB, total=4 * GIB)
    report = MemoryReport(DeviceMemory(0, GIB, 2 * GIB, 3 * GIB, 4 * GIB, 5 * GIB), host)
    assert str(report) == (
        "cuda:0: 1.00 GiB allocated, peak 2.00 GiB, 3.00 GiB reserved, 4.00 GiB of 5.00 GiB free; "
        "host: 1.00 GiB in this process, 2.00 GiB of 4.00 GiB free"
    )
    with_teachers = dataclasses.replace(report, teachers=TeacherMemory(2, 3 * GIB, GIB))
    assert str(with_teachers) == f"{report}; 2 teachers: 3.00 GiB in host memory, output layers 1.00 GiB"
    of_host = {"rss": GIB, "available": 2 * GIB, "total": 4 * GIB}
    assert json.loads(json.dumps(report.as_dict()))["host"] == of_host
