"""``build_inference_model`` on real megatron-core, beside a model that trains, layout by layout."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from megatron_rl_patches.errors import InferenceOnlyError
from megatron_rl_patches.inference import build_inference_model, forward_log_probs
from megatron_rl_patches.testing import TinyModel
from tests.ranks import by_speed, everywhere, on_ranks
from tests.references import tiny_gpt
from tests.references.live_bytes import reachable_bytes
from tests.worlds.unchanged import megatron_unchanged

pytestmark = pytest.mark.runs("inference-only", ranks=[1, 2])

SYNC_FUNCTIONS = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func", "timers")

ROUTER = {
    "moe_router_topk": 2,
    "moe_router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "1 rank, tied embeddings": (1, {"tied": True}),
    "TP 2": (2, {"tp": 2}),
    "PP 2, tied embeddings": (2, {"pp": 2, "tied": True}),
    "PP 2, VPP 2": (2, {"pp": 2, "vpp": 2}),
    "CP 2": (2, {"cp": 2}),
    "EP 2, MoE": (2, {"ep": 2, "kind": "moe", "config": ROUTER}),
}


def in_ddp(chunks: list[Any], config: Any) -> list[Any]:
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True)
    return [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]


def random_streams() -> list[Any]:
    tracked = get_cuda_rng_tracker().get_states()
    return [
        random.getstate(),
        str(np.random.get_state()),
        torch.get_rng_state().tolist(),
        {name: state.tolist() for name, state in tracked.items()},
    ]


def _sharding(chunk: Any) -> dict[str, Any]:
    described = ("key", "dtype", "local_shape", "global_shape", "global_offset", "replica_id")
    return {
        name: [str(getattr(entry, attribute, None)) for attribute in described]
        for name, entry in chunk.sharded_state_dict().items()
    }


def _described(chunk: Any) -> dict[str, Any]:
    return {name: (p.dtype, p.shape, dict(vars(p))) for name, p in chunk.named_parameters()}


def scores_of(model: list[Any]) -> list[torch.Tensor]:
    """Return scores of four microbatches, by the schedule that Megatron chooses; on the last stage."""
    batch = {"tokens": torch.arange(16).view(2, 8), "lengths": [8, 8]}
    return getattr(forward_log_probs(model, [batch] * 4, progress=False), "log_probs", [])


@pytest.mark.parametrize("layout", by_speed(LAYOUTS, fast=("1 rank", "TP 2")))
@on_ranks(lambda layout: LAYOUTS[layout][0], timeout=240)
def test_is_a_policy_without_what_trains_it(layout: str) -> None:
    sizes: dict[str, Any] = {"overlap_param_gather": False, **LAYOUTS[layout][1]}
    sizes["config"] = {"num_query_groups": 2, **sizes.get("config", {})}
    for dtype in ("fp32", "bf16"):
        _compare_with_a_policy(TinyModel(bf16=dtype == "bf16", **sizes), dtype)


def _compare_with_a_policy(options: TinyModel, dtype: Any) -> None:
    options.initialize()
    config, provider = options.transformer_config(), options.provider
    reference = options.chunks(config)
    described = [_described(chunk) for chunk in reference]
    model_parallel_cuda_manual_seed(options.seed)  # again, so that the same weights are drawn
    streams = random_streams()
    initialized = build_inference_model(provider, config, dtype=dtype, perform_initialization=True)
    for ours, theirs in zip(initialized, reference, strict=True):
        assert all(map(torch.equal, ours.parameters(), theirs.parameters())), "other weights than get_model's"
    assert random_streams() == streams, "a random stream has moved"
    del initialized, ours, theirs
    policy = in_ddp(reference, config)
    for name in SYNC_FUNCTIONS:
        setattr(config, name, print)

    config_before, streams_before, bytes_before = dict(vars(config)), random_streams(), reachable_bytes()
    with mock.patch.object(torch.distributed, "all_reduce", side_effect=AssertionError("a collective")):
        teacher = build_inference_model(provider, config, dtype=dtype)
    parameters = [parameter for chunk in teacher for parameter in chunk.parameters()]
    bytes_of_parameters = sum(p.numel() * p.element_size() for p in parameters)
    assert reachable_bytes() - bytes_before == pytest.approx(bytes_of_parameters, rel=0.01)
    assert dict(vars(config)) == config_before, "the policy's config was touched"
    assert random_streams() == streams_before, "a random stream has moved"
    refusal = r"zero_grad_buffer: .* Because of build_inference_model"
    for chunk in teacher:
        with pytest.raises(InferenceOnlyError, match=refusal):
            chunk.zero_grad_buffer()
        bare = chunk.module if dtype == "bf16" else chunk
        assert chunk.config is bare.config is not config
        assert [getattr(bare.config, name) for name in SYNC_FUNCTIONS] == [None] * len(SYNC_FUNCTIONS)
        same = {name: value for name, value in config_before.items() if name not in SYNC_FUNCTIONS}
        assert {name: getattr(bare.config, name) for name in same} == same
    assert not any(module.training for chunk in teacher for module in chunk.modules())
    assert not any(p.requires_grad or hasattr(p, "main_grad") for p in parameters)
    assert all(bool(p.isnan().all()) for p in parameters), "a parameter is not NaN before loading"
    assert [_described(chunk) for chunk in teacher] == described

    for ours, wrapped in zip(teacher, policy, strict=True):
        theirs = wrapped.module
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert _sharding(ours) == _sharding(theirs)
        for name in ("vp_stage", "vp_size"):
            assert getattr(ours, name, None) == getattr(theirs, name, None)
        ours.load_state_dict(theirs.state_dict())

    for name in SYNC_FUNCTIONS:
        setattr(config, name, None)
    scores, of_policy = scores_of(teacher), scores_of(policy)
    assert 8 in everywhere(len(scores))
    assert len(scores) == len(of_policy) and all(map(torch.equal, scores, of_policy))
    assert all(bool(score.isfinite().all()) for score in scores)


@pytest.mark.parametrize("expert_parallel", [1, pytest.param(2, marks=pytest.mark.slow)])
@on_ranks(lambda expert_parallel: expert_parallel)
def test_mixtures_of_experts_train_before_and_after_a_build(expert_parallel: int) -> None:
    """Their classes keep CUDA streams for all models of the process."""
    no_overlap = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    dispatcher = {"moe_token_dispatcher_type": "alltoall"}
    options = TinyModel(kind="moe", ep=expert_parallel, config=dispatcher, **no_overlap)

    def train(policy: list[Any], optimizer: Any) -> list[float]:
        return tiny_gpt.train(policy, optimizer, tiny_gpt.data_iterators(options), [1], options)

    losses = []
    options.initialize()
    before = [tiny_gpt.inference_model(options, device) for device in ("meta", "cpu")]
    for _ in range(2):
        policy, optimizer = options.build()
        losses.append(train(policy, optimizer))
        teachers = [before[1], tiny_gpt.inference_model(options, "cpu")]
        tiny_gpt.inference_model(options, "meta")
        for teacher in teachers:
            teacher[0].load_state_dict(policy[0].module.state_dict())
            assert all(map(torch.equal, scores_of(teacher), scores_of(policy)))
        losses.append(train(policy, optimizer))
    assert losses[:2] == losses[2:]


def _peak_bytes() -> int:
    # Not getrusage(), which counts the process that this one was forked from.
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) * 1024


@on_ranks(1, megatron=False, env={"CUDA_VISIBLE_DEVICES": ""})
def test_on_the_meta_device_without_cuda() -> None:
    """Not in ``cpu_backend``: as somebody calls it who counts the parameters of a model on a laptop."""
    assert not torch.cuda.is_available()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)

    def provider(pre_process: bool, post_process: bool, config: Any) -> GPTModel:
        return GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False),
            vocab_size=128_000,
            max_sequence_length=64,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=True,
            position_embedding_type="rope",
        )

    shape = {"num_layers": 4, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8}
    config = TransformerConfig(**shape, num_moe_experts=8, add_bias_linear=False)
    [chunk] = build_inference_model(provider, config, device="meta")
    # Per layer: query and output, keys and values, router, and two matrices in each of eight experts.
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * 4096 + 8 * 2 * 4096 * 16384 + 4 * 4096
    size = sum(p.numel() * p.element_size() for p in chunk.parameters())
    assert size == pytest.approx(2 * (4 * layer + 128_000 * 4096), rel=1e-4)
    assert _peak_bytes() < size / 8
    assert {(p.device.type, p.dtype) for p in chunk.parameters()} == {("meta", torch.bfloat16)}
    assert chunk.module.rotary_pos_emb.inv_freq.device.type == "cpu"

    config.hidden_size, config.ffn_hidden_size, config.num_layers = 64, 64, 1
    config.moe_token_dispatcher_type = "alltoall"
    config.moe_shared_expert_intermediate_size, config.moe_shared_expert_overlap = 64, True
    recording = copy.copy(config)
    recording.moe_enable_routing_replay = True

    def failing(pre_process: bool, post_process: bool, config: Any) -> Any:
        provider(pre_process, post_process, config)
        raise KeyError("of the provider")

    with megatron_unchanged():
        build_inference_model(provider, config, device="meta")
        [small] = build_inference_model(provider, config, device="cpu")
        [initialized] = build_inference_model(provider, config, device="cpu", perform_initialization=True)
        with pytest.raises(KeyError, match="of the provider"):
            build_inference_model(failing, recording, device="cpu", dtype="fp32")
    assert {p.device.type for p in (*small.parameters(), *initialized.parameters())} == {"cpu"}
    assert not any(bool(p.isnan().any()) for p in initialized.parameters())
