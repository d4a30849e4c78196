"""``build_inference_model`` on real megatron-core, beside a model that trains, layout by layout."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_rl_patches.errors import InferenceOnlyError
from megatron_rl_patches.testing import cpu_backend, spawn_ranks
from tests.real.small_models import (
    LAYOUTS,
    Layout,
    by_speed,
    described_parameters,
    get_model,
    in_ddp,
    initialize,
    model_provider,
    outputs_of,
    random_streams,
    sharding,
    transformer_config,
)

pytestmark = pytest.mark.runs("inference-only", ranks=[1, 2])

SYNC_FUNCTIONS = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func", "timers")


@dataclass
class Report:
    """One rank's account; everything is compared on the rank, which has both models."""

    differences: list[str] = field(default_factory=list)
    bytes_live: int = 0
    bytes_of_parameters: int = 0
    outputs: int = 0

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.differences.append(what)


def _compare_with_a_policy(layout: Layout, dtype: str) -> Report:
    import torch

    from megatron_rl_patches.inference import build_inference_model
    from tests.real.live_bytes import live_bytes

    report = Report()
    initialize(layout)
    config, provider = transformer_config(layout, dtype), model_provider(layout)
    reference = get_model(provider, config, layout)
    described = [described_parameters(chunk) for chunk in reference]
    policy = in_ddp(reference, config)
    for name in SYNC_FUNCTIONS:
        setattr(config, name, print)

    config_before, streams_before, bytes_before = dict(vars(config)), random_streams(), live_bytes()
    with mock.patch.object(torch.distributed, "all_reduce", side_effect=AssertionError("a collective")):
        teacher = build_inference_model(provider, config, dtype=dtype)
    report.bytes_live = live_bytes() - bytes_before
    parameters = [parameter for chunk in teacher for parameter in chunk.parameters()]
    report.bytes_of_parameters = sum(p.numel() * p.element_size() for p in parameters)

    report.expect(dict(vars(config)) == config_before, "the policy's config was touched")
    report.expect(random_streams() == streams_before, "a random stream has moved")
    for chunk in teacher:
        with pytest.raises(
            InferenceOnlyError, match=r"zero_grad_buffer: .* Because of build_inference_model"
        ):
            chunk.zero_grad_buffer()
        bare = chunk.module if dtype == "bf16" else chunk
        report.expect(chunk.config is bare.config, "wrapper and model have different configs")
        report.expect(bare.config is not config, "the policy's config is shared")
        left = [name for name in SYNC_FUNCTIONS if getattr(bare.config, name) is not None]
        report.expect(not left, f"the config has {left}")
        differing = [
            name
            for name, value in config_before.items()
            if name not in SYNC_FUNCTIONS and getattr(bare.config, name) != value
        ]
        report.expect(not differing, f"the config differs in {differing}")
    report.expect(
        not any(m.training for chunk in teacher for m in chunk.modules()), "not all is in eval mode"
    )
    report.expect(not any(p.requires_grad or hasattr(p, "main_grad") for p in parameters), "something trains")
    report.expect(all(bool(p.isnan().all()) for p in parameters), "a parameter is not NaN before loading")
    report.expect(
        [described_parameters(chunk) for chunk in teacher] == described, "parameters or their attributes"
    )

    for ours, wrapped in zip(teacher, policy, strict=True):
        theirs = wrapped.module
        report.expect(list(ours.state_dict()) == list(theirs.state_dict()), "state_dict keys")
        report.expect(sharding(ours) == sharding(theirs), "sharded_state_dict")
        report.expect(
            [getattr(ours, name, None) for name in ("vp_stage", "vp_size")]
            == [getattr(theirs, name, None) for name in ("vp_stage", "vp_size")],
            "the virtual stage",
        )
        ours.load_state_dict(theirs.state_dict())

    for name in SYNC_FUNCTIONS:
        setattr(config, name, None)
    ours, theirs = outputs_of(teacher), outputs_of(policy)
    report.outputs = len(ours)
    report.expect(len(ours) == len(theirs), "the number of outputs")
    report.expect(all(map(torch.equal, ours, theirs)), "the outputs")
    report.expect(all(bool(output.isfinite().all()) for output in ours), "outputs are not finite")
    return report


def _compare_in_both_dtypes(layout: Layout) -> dict[str, Report]:
    with cpu_backend():
        return {dtype: _compare_with_a_policy(layout, dtype) for dtype in ("fp32", "bf16")}


@pytest.mark.parametrize("name", by_speed(LAYOUTS, fast=("1 rank", "TP 2")))
def test_is_a_policy_without_what_trains_it(name: str) -> None:
    layout = LAYOUTS[name]
    ranks = spawn_ranks(_compare_in_both_dtypes, layout.ranks, layout, timeout=240)
    for dtype in ("fp32", "bf16"):
        reports = [rank[dtype] for rank in ranks]
        assert [report.differences for report in reports] == [[]] * layout.ranks
        assert any(report.outputs == 4 for report in reports)
        for report in reports:
            assert report.bytes_live == pytest.approx(report.bytes_of_parameters, rel=0.01)


# --- next to a policy that trains

STEPS, MICROBATCHES = 3, 2


def _teacher_provider(options: Any) -> Callable[..., Any]:
    from tests.real import tiny_gpt

    return lambda config, **ends: tiny_gpt._chunk(config, options.parallelism, None)


class _ScoredBatches:
    """The policy's data; from the second step on, a teacher scores before a microbatch is handed over.

    In the first step bucket groups learn how many gradients to wait for.
    """

    def __init__(self, data: Any, teacher: list[Any]) -> None:
        self._data, self._teacher = data, teacher
        self._handed_over = 0

    def __iter__(self) -> _ScoredBatches:
        return self

    def __next__(self) -> Any:
        if self._handed_over >= MICROBATCHES:
            outputs_of(self._teacher)
        self._handed_over += 1
        return next(self._data)


def _train(make_teacher: Callable[[Any, Any, Any], list[Any]] | None, wait: bool) -> dict[str, Any]:
    """A policy's losses, the hash of its weights and optimizer, and random streams, after training."""
    import torch

    from tests.real import tiny_gpt

    options = tiny_gpt.Options()
    random.seed(3)
    torch.manual_seed(3)
    policy, optimizer = tiny_gpt.build(options)
    data = tiny_gpt.data_iterators(options)
    if make_teacher is not None:
        config = policy[0].config
        teacher = make_teacher(_teacher_provider(options), config, policy)
        outputs_of(teacher)
        if not wait:
            data = [_ScoredBatches(data[0], teacher)]
    try:
        losses: Any = tiny_gpt.train(policy, optimizer, data, [MICROBATCHES] * STEPS, options)
    except AssertionError as error:
        losses = str(error)
    return {
        "losses": losses,
        "weights": tiny_gpt.checksum(policy, optimizer),
        "streams": random_streams(),
    }


def _ours(provider: Callable[..., Any], config: Any, policy: list[Any]) -> list[Any]:
    from megatron_rl_patches.inference import build_inference_model

    teacher = build_inference_model(provider, config, dtype="bf16")
    weights = policy[0].module.state_dict()
    teacher[0].load_state_dict({name: value for name, value in weights.items() if value is not None})
    return teacher


def _on_the_policys_config(provider: Callable[..., Any], config: Any, policy: list[Any]) -> list[Any]:
    # What a framework does that keeps one config for all its models.
    return [provider(config).requires_grad_(False)]


def _train_beside_teachers() -> dict[str, Any]:
    with cpu_backend():
        return {
            "alone": _train(None, wait=False),
            "teacher before": _train(_ours, wait=True),
            "teacher within": _train(_ours, wait=False),
            "shared config": _train(_on_the_policys_config, wait=False),
        }


@pytest.mark.slow
def test_a_teacher_leaves_no_trace_in_the_training_of_a_policy() -> None:
    """A bf16 teacher scores before every microbatch of an fp32 policy with DDP and distributed optimizer.

    On the policy's own config, the teacher's schedule leaves the policy's ``no_sync`` while the policy still
    accumulates.
    """
    for runs in spawn_ranks(_train_beside_teachers, 2, timeout=240):
        assert len(runs["alone"]["losses"]) == STEPS
        assert runs["teacher before"] == runs["alone"]
        assert runs["teacher within"] == runs["alone"]
        # The policy has reduced its gradients without those of the last microbatch. Nothing says so;
        # older releases fail: "Cannot set grad twice".
        assert runs["shared config"]["losses"] != runs["alone"]["losses"]


# --- mixtures of experts, whose classes keep CUDA streams for all models of the process


def _beside_mixtures_of_experts(expert_parallel: int) -> list[str]:
    """Which policies fail to train, and which models fail to score as their policy does."""
    with cpu_backend():
        import torch

        from megatron_rl_patches.inference import forward_log_probs
        from tests.real import tiny_gpt

        sizes, failures = tiny_gpt.Parallelism(ep=expert_parallel), []
        options = tiny_gpt.Options(
            overlap_grad_reduce=False,
            overlap_param_gather=False,
            parallelism=sizes,
            experts=4,
            dispatcher="alltoall",
        )
        tokens = torch.randint(tiny_gpt.VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(0))

        def train(policy: list[Any], optimizer: Any) -> list[float]:
            return tiny_gpt.train(policy, optimizer, tiny_gpt.data_iterators(options), [1], options)

        def scores(model: list[Any]) -> list[torch.Tensor]:
            scored = forward_log_probs(model, [{"tokens": tokens, "lengths": [8, 8]}], progress=False)
            assert scored is not None
            return scored.log_probs

        losses = []
        tiny_gpt.initialize(sizes, options.seed)
        before = [tiny_gpt.inference_model(options, device) for device in ("meta", "cpu")]
        for _ in range(2):
            policy, optimizer = tiny_gpt.build(options)
            losses.append(train(policy, optimizer))
            teachers = [before[1], tiny_gpt.inference_model(options, "cpu")]
            tiny_gpt.inference_model(options, "meta")
            for teacher in teachers:
                teacher[0].load_state_dict(policy[0].module.state_dict())
                if not all(map(torch.equal, scores(teacher), scores(policy))):
                    failures.append("a model that only scores")
            losses.append(train(policy, optimizer))
        if losses[:2] != losses[2:]:
            failures.append(f"losses {losses}")
        return failures


@pytest.mark.parametrize("expert_parallel", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_mixtures_of_experts_train_before_and_after_a_build(expert_parallel: int) -> None:
    for failures in spawn_ranks(_beside_mixtures_of_experts, expert_parallel, expert_parallel, timeout=120):
        assert failures == []


def _attributes_of_megatron() -> dict[str, Any]:
    """What the modules of Megatron and their classes hold, by name; what containers hold, too."""
    attributes: dict[str, Any] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("megatron."):
            classes = [value for value in vars(module).values() if isinstance(value, type)]
            for owner in (module, *(one for one in classes if one.__module__.startswith("megatron."))):
                for name, value in vars(owner).items():
                    # Python itself caches what pickles of a class need, and which warnings were given.
                    if name not in ("__slotnames__", "__warningregistry__"):
                        attributes[f"{module_name}.{owner.__name__}.{name}"] = value, _content(value)
    return attributes


def _content(value: Any) -> Any:
    if hasattr(value, "cache_info"):
        return value.cache_info().currsize
    return list(map(id, value)) if isinstance(value, (dict, list, set)) else None


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        name
        for name in before.keys() | after.keys()
        if name not in before
        or name not in after
        or before[name][0] is not after[name][0]
        or before[name][1] != after[name][1]
    ]


def _without_cuda() -> dict[str, Any]:
    """Not in ``cpu_backend``: as somebody calls it who counts the parameters of a model on a laptop."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    from megatron_rl_patches.inference import build_inference_model

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

    config = TransformerConfig(
        num_layers=4,
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        num_moe_experts=8,
        add_bias_linear=False,
    )

    [chunk] = build_inference_model(provider, config, device="meta")
    before = _attributes_of_megatron()
    config.hidden_size, config.ffn_hidden_size, config.num_layers = 64, 64, 1
    config.moe_token_dispatcher_type = "alltoall"
    config.moe_shared_expert_intermediate_size, config.moe_shared_expert_overlap = 64, True
    build_inference_model(provider, config, device="meta")
    [small] = build_inference_model(provider, config, device="cpu")
    [initialized] = build_inference_model(provider, config, device="cpu", perform_initialization=True)
    return {
        "left in Megatron": _changed(before, _attributes_of_megatron()),
        "bytes": sum(p.numel() * p.element_size() for p in chunk.parameters()),
        "peak of the process": _peak_bytes(),
        "where": {(p.device.type, p.dtype) for p in chunk.parameters()},
        "inverse frequencies": chunk.module.rotary_pos_emb.inv_freq.device.type,
        "on cpu": {p.device.type for p in (*small.parameters(), *initialized.parameters())},
        "initialized": not any(bool(p.isnan().any()) for p in initialized.parameters()),
        "cuda": torch.cuda.is_available(),
    }


def _peak_bytes() -> int:
    # Not getrusage(), which counts the process that this one was forked from.
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) * 1024


def test_on_the_meta_device_without_cuda() -> None:
    import torch

    [counted] = spawn_ranks(_without_cuda, 1, timeout=120, env={"CUDA_VISIBLE_DEVICES": ""})
    assert not counted["cuda"]
    assert counted["left in Megatron"] == []
    # Per layer: query and output, keys and values, router, and two matrices in each of eight experts.
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * 4096 + 8 * 2 * 4096 * 16384 + 4 * 4096
    assert counted["bytes"] == pytest.approx(2 * (4 * layer + 128_000 * 4096), rel=1e-4)
    assert counted["peak of the process"] < counted["bytes"] / 8
    assert counted["where"] == {("meta", torch.bfloat16)}
    assert counted["inverse frequencies"] == "cpu"
    assert counted["on cpu"] == {"cpu"} and counted["initialized"]
