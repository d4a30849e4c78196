"""``TeacherPool`` and the estimate of memory on real megatron-core: scores, bytes, checkpoints."""

import copy
import gc
import pickle
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from megatron_rl_patches import inference
from megatron_rl_patches.errors import CheckpointError, InferenceOnlyError, InvalidInputError
from megatron_rl_patches.inference.memory.estimate import OptimizerSettings
from megatron_rl_patches.inference.models.model import freeze
from megatron_rl_patches.testing import TinyModel
from tests.ranks import by_speed, everywhere, on_ranks
from tests.real import matrix
from tests.references import memory_cases, tiny_gpt
from tests.references.live_bytes import reachable_bytes
from tests.references.memory_cases import EXPERTS, TIED, Case
from tests.worlds.model import fill_at_random, save, scores_of

TEACHERS = ("a", "b", "c")


def _bits(model: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    return [parameter.view(torch.uint8).clone() for chunk in model for parameter in chunk.parameters()]


@on_ranks(2, timeout=180)
def test_pooled_teachers_score_as_they_do_alone(tmp_path: Path) -> None:
    options = TinyModel(pp=2, vpp=2, bf16=True, seed=7)
    options.initialize()
    alone = tiny_gpt.inference_model(options)
    expected = {}
    for seed, name in enumerate(TEACHERS):
        fill_at_random(alone, seed)
        expected[name] = [*scores_of(alone), *_bits(alone)]
    save(alone, tmp_path)

    bytes_without = reachable_bytes()
    pool: Any = inference.TeacherPool(tiny_gpt.inference_model(options))
    model_bytes = reachable_bytes() - bytes_without
    assert model_bytes == sum(parameter.nbytes for chunk in pool.model for parameter in chunk.parameters())
    fill_at_random(pool.model)  # through .data, as loaders of Hugging Face weights do it
    for name, source in (("a", None), ("b", partial(fill_at_random, seed=1)), ("c", tmp_path)):
        pool.add(name, source)
    assert reachable_bytes() - bytes_without == (1 + len(TEACHERS)) * model_bytes

    for name in (*TEACHERS, "b", "a"):
        with pool.use(name) as model:
            assert all(map(torch.equal, [*scores_of(model), *_bits(model)], expected[name]))
    before = reachable_bytes()
    heads = {name: pool.head(name) for name in TEACHERS}
    assert reachable_bytes() - before == pool.head_bytes
    [estimated] = inference.estimate_memory(pool.model, teachers=len(pool), teacher_heads=True).stages
    reported = inference.memory_report(pool=pool)
    accounts = pool.host_bytes, pool.head_bytes
    assert (estimated.with_teachers.host, estimated.with_teachers.teacher_heads) == accounts
    assert (reported.teacher_weights, reported.teacher_heads) == accounts
    for name, head in heads.items():
        with pool.use(name) as model:
            own = inference.output_head(model)
        assert (own is None) == (head is None)  # only the last stage has one
        assert own is None or torch.equal(own.weight, head.weight)
    pool.remove("b")
    del heads["b"]
    assert pool.head_bytes == sum(head.nbytes for head in heads.values() if head is not None)


@pytest.mark.parametrize("kind", by_speed(("dense", "moe", "mla", "mtp", "hybrid"), fast=("dense",)))
@on_ranks(1)
def test_a_teacher_that_is_deleted_frees_its_memory_at_once(kind: str) -> None:
    options = matrix.tiny(kind, bf16=True)
    options.initialize()
    batch = {"tokens": torch.zeros(1, 8, dtype=torch.int64), "total_lengths": [8]}
    tiny_gpt.inference_model(options)  # Megatron's classes keep what the first model of a process makes
    gc.collect()
    gc.disable()
    try:
        model = tiny_gpt.inference_model(options)
        fill_at_random(model)
        freed = [weakref.ref(parameter) for parameter in model[0].parameters()]
        pool = inference.TeacherPool(model)
        pool.add("math")
        with pool.use("math"):
            scores = inference.forward_log_probs(model, [batch], progress=False)
            hidden = inference.forward_hidden_states(model, [batch], progress=False)
        head = pool.head("math")
        freed += map(weakref.ref, (pool, head.weight, hidden[0], scores.log_probs[0]))
        with pytest.raises(InvalidInputError, match="do not fit"):
            inference.forward_log_probs(model, [{**batch, "total_lengths": [9]}], progress=False)
        assert model[0].requires_grad_(False) is model[0]
        del model, pool, scores, hidden, head
        assert [tensor() for tensor in freed if tensor() is not None] == []
    finally:
        gc.enable()
    layer = torch.nn.Linear(2, 2)
    freeze([layer], "teacher", "a test")
    copied = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    with pytest.raises(InferenceOnlyError, match=r"requires_grad_\(True\)"):
        copied.requires_grad_()
    assert copied.requires_grad_(False) is copied


# --- The estimate against real bytes, part by part.

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


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.nightly), pytest.param(2, marks=pytest.mark.slow)]
)
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
EXPERT_TP = {"num_moe_experts": 4, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "first": {**UNEVEN, "num_layers": 6, "num_layers_in_first_pipeline_stage": 2},
    "last, VPP 2": {**VPP, "num_layers": 6, "num_layers_in_last_pipeline_stage": 2},
    "embedding": {**UNEVEN, "num_layers": 5, "account_for_embedding_in_pipeline_split": True},
    "loss, VPP 2": {**VPP, "num_layers": 7, "account_for_loss_in_pipeline_split": True},
    "layout, VPP 2": {**VPP, "num_layers": 4, "pipeline_model_parallel_layout": "E|tt|t|tL"},
    # The experts of TP 2 are whole with expert TP 1, spread over both ranks.
    "expert TP 1, EP 2": {**EXPERT_TP, "num_layers": 2, "expert_model_parallel_size": 2},
}


@pytest.mark.nightly
@on_ranks(2)
def test_a_rank_has_as_many_parameters_as_estimated() -> None:
    for name, shape in SHAPES.items():
        config = TransformerConfig(**MOE, **shape, pipeline_dtype=torch.float32)
        sizes = {"tp": config.tensor_model_parallel_size, "ep": config.expert_model_parallel_size}
        sizes["pp"] = config.pipeline_model_parallel_size
        sizes["vpp"] = config.virtual_pipeline_model_parallel_size
        TinyModel(**sizes, expert_tp=config.expert_tensor_parallel_size).initialize()
        provide = partial(memory_cases.provide, Case(name, {"vocab_size": 1024}))
        chunks = inference.build_inference_model(provide, config, device="meta")
        count = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
        estimate = inference.estimate_memory(config, vocab_size=1024) if dist.get_rank() == 0 else None
        stage = everywhere(estimate)[0].stages[parallel_state.get_pipeline_model_parallel_rank()]
        assert stage.dense_parameters + stage.expert_parameters == count, name


@on_ranks(1)
def test_a_checkpoint_of_another_dtype_is_no_teacher(tmp_path: Path) -> None:
    options = TinyModel()
    options.initialize()
    save(tiny_gpt.inference_model(options), tmp_path)
    pool = inference.TeacherPool(tiny_gpt.inference_model(TinyModel(bf16=True)))
    with pytest.raises(CheckpointError, match="of another dtype"):
        pool.add("math", tmp_path)
