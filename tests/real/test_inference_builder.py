"""``build_inference_model`` on real megatron-core: beside a model that trains, and what it refuses."""

import copy
import os
import random
import re
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.module import Float16Module

from megatron_rl_patches.common.chunks import unwrap
from megatron_rl_patches.errors import InferenceOnlyError, InvalidInputError
from megatron_rl_patches.inference import TeacherPool, build_inference_model, load_inference_checkpoint
from megatron_rl_patches.testing import TinyModel
from tests.ranks import by_speed, everywhere, on_ranks
from tests.real import matrix
from tests.references.live_bytes import reachable_bytes
from tests.worlds.model import fill_at_random, save, scores_of
from tests.worlds.unchanged import megatron_unchanged

pytestmark = pytest.mark.runs("inference-only", ranks=[1, 2])

SYNC_FUNCTIONS = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func", "timers")

EXPERTS = matrix.MODELS["MoE, expert bias"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "1 rank, tied embeddings": {"tied": True},
    "TP 2, bf16": {"tp": 2, "bf16": True},
    "PP 2, tied embeddings, bf16": {"pp": 2, "tied": True, "bf16": True},
    "PP 2, VPP 2": {"pp": 2, "vpp": 2},
    "EP 2, MoE, bf16": {"ep": 2, **EXPERTS, "bf16": True},
}


def random_streams() -> list[Any]:
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return [
        random.getstate(),
        str(np.random.get_state()),
        torch.get_rng_state().tolist(),
        {name: state.tolist() for name, state in tracked.items()},
    ]


def _sharding(chunk: Any) -> dict[str, Any]:
    described = ("key", "dtype", "local_shape", "global_shape", "global_offset", "replica_id")
    entries = chunk.sharded_state_dict().items()
    return {name: [str(getattr(entry, what, None)) for what in described] for name, entry in entries}


def _described(chunk: Any) -> dict[str, Any]:
    return {name: (p.dtype, p.shape, dict(vars(p))) for name, p in chunk.named_parameters()}


@pytest.mark.parametrize("layout", by_speed(LAYOUTS, fast=("1 rank, tied embeddings", "TP 2, bf16")))
@on_ranks(lambda layout: 1 + (not layout.startswith("1 rank")), timeout=240)
def test_is_a_policy_without_what_trains_it(layout: str) -> None:
    sizes = LAYOUTS[layout]
    config = {"num_query_groups": 2, **sizes.get("config", {})}
    options = TinyModel(**{**sizes, "config": config}, overlap_param_gather=False)
    dtype: Any = "bf16" if options.bf16 else "fp32"
    options.initialize()
    config, provider = options.transformer_config(), options.provider
    reference = options.chunks(config)
    described = [_described(chunk) for chunk in reference]
    tensor_parallel.model_parallel_cuda_manual_seed(options.seed)  # again, so that the same weights are drawn
    streams = random_streams()
    initialized = build_inference_model(provider, config, dtype=dtype, perform_initialization=True)
    for ours, theirs in zip(initialized, reference, strict=True):
        assert all(map(torch.equal, ours.parameters(), theirs.parameters())), "other weights than get_model's"
    assert random_streams() == streams, "a random stream has moved"
    del initialized, ours, theirs
    policy, _ = options.in_training(config, reference)
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

    for ours, theirs in zip(teacher, [wrapped.module for wrapped in policy], strict=True):
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert _sharding(ours) == _sharding(theirs)
        for name in ("vp_stage", "vp_size"):
            assert getattr(ours, name, None) == getattr(theirs, name, None)
        ours.load_state_dict(theirs.state_dict())

    for name in SYNC_FUNCTIONS:
        setattr(config, name, None)
    scores, of_policy = scores_of(teacher), scores_of(policy)
    assert 4 in everywhere(len(scores))
    assert len(scores) == len(of_policy) and all(map(torch.equal, scores, of_policy))
    assert all(bool(score.isfinite().all()) for score in scores)


@on_ranks(1, cpu_backend=False)
def test_on_the_meta_device_without_cuda() -> None:
    """Not in ``cpu_backend``: as somebody calls it who counts the parameters of a model on a laptop."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    assert not torch.cuda.is_available()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)

    shape = {"hidden_size": 4096, "num_moe_experts": 8}
    options = TinyModel(kind="moe", vocab_size=128_000, tied=True, config=shape)
    config, provider = options.transformer_config(), options.provider
    [chunk] = build_inference_model(provider, config, device="meta")
    size = sum(p.numel() * p.element_size() for p in chunk.parameters())
    assert size > 8e9
    # Not getrusage(), which counts the process that this one was forked from.
    [peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
    assert int(peak.split()[1]) * 1024 < size / 8
    assert {(p.device.type, p.dtype) for p in chunk.parameters()} == {("meta", torch.bfloat16)}
    config.hidden_size, config.ffn_hidden_size, config.num_layers = 64, 64, 1
    config.moe_token_dispatcher_type = "alltoall"
    config.moe_shared_expert_intermediate_size, config.moe_shared_expert_overlap = 64, True
    recording = copy.copy(config)
    recording.moe_enable_routing_replay = True

    def failing(**arguments: Any) -> Any:
        provider(**arguments)
        raise KeyError("of the provider")

    with pytest.raises(InvalidInputError, match="there is no CUDA device: pass device='cpu'"):
        build_inference_model(provider, config, device="cuda")
    with megatron_unchanged():
        build_inference_model(provider, config, device="meta")
        [small] = build_inference_model(provider, config, device="cpu")
        [initialized] = build_inference_model(provider, config, device="cpu", perform_initialization=True)
        with pytest.raises(KeyError, match="of the provider"):
            build_inference_model(failing, recording, device="cpu", dtype="fp32")
    assert {p.device.type for p in (*small.parameters(), *initialized.parameters())} == {"cpu"}
    assert not any(bool(p.isnan().any()) for p in initialized.parameters())


OPTIONS = TinyModel()
INITIALIZE = "pass perform_initialization=True, with which parameters are constructed on the device"
OTHER_CONFIG = "the model provider does not build on the config that it is called with, but on one that"


def refused(
    message: str, provider: Any, config: Any, error: type[Exception] = InferenceOnlyError, **arguments: Any
) -> None:
    with pytest.raises(error) as raised:
        build_inference_model(provider, config, **{"dtype": "fp32", **arguments})
    assert type(raised.value) is error
    assert re.match(message, str(raised.value), re.DOTALL), raised.value


def prepared() -> tuple[Callable[..., Any], Any]:
    OPTIONS.initialize()
    return OPTIONS.provider, OPTIONS.transformer_config()


#: What providers do with a weight that needs more of it than shape and dtype, and what the error says of it.
NEEDING_WEIGHTS: dict[Callable[[Any, Any], Any], str] = {
    lambda model, weight: setattr(model, "scale", float(weight.abs().max())): (
        r"reads a weight while it builds the model \(RuntimeError: Tensor.item\(\) cannot"
    ),
    lambda model, weight: model.decoder.register_buffer("norms", weight.detach().norm(dim=1)): (
        "makes decoder.norms from a weight while it builds the model"
    ),
    lambda model, weight: setattr(model, "views", {1: [weight.detach()]}): "makes views from a weight",
    lambda model, weight: setattr(model, "reference", weakref.ref(weight)): (
        r"holds another reference to output_layer.weight than modules do \(RuntimeError: "
    ),
}


def _misused(provider: Any, misuse: Any, **arguments: Any) -> Any:
    model = provider(**arguments)
    misuse(model, model.output_layer.weight)
    return model


@on_ranks(1)
def test_models_that_train() -> None:
    provider, config = prepared()
    policy, _ = OPTIONS.in_training(config, OPTIONS.chunks(config))
    returned = "the model provider returned a model"
    wrapping = "the model provider wraps the model in DistributedDataParallel"
    refused(wrapping, lambda **ends: OPTIONS.in_training(ends["config"], [provider(**ends)]), config)
    refused(f"{returned} in DistributedDataParallel", lambda **_: policy[0], config)
    refused(f"{returned} whose parameter", lambda **_: policy[0].module, config)
    ddp = type("DistributedDataParallel", (torch.nn.Module,), {})  # known by its name
    for kind in (ddp, type("V3", (ddp,), {}), type("FSDPModule", (torch.nn.Module,), {})):
        in_it = f"{returned} in {kind.__name__}, which trains"
        refused(in_it, lambda kind=kind: torch.nn.Sequential(kind()), config)

    own = OPTIONS.transformer_config()
    bare = provider(config=own)
    not_new = "the model provider .*weight, which it has not just created: build and return a new model$"
    weight = bare.output_layer.weight
    shared = partial(_misused, provider, lambda model, _: setattr(model.output_layer, "weight", weight))
    for on_device in (False, True):
        refused(not_new, lambda **_: bare, config, perform_initialization=on_device)
        refused(not_new, shared, config, perform_initialization=on_device)
    # The policies that were refused still train.
    assert all(p.requires_grad for p in (*policy[0].parameters(), *bare.parameters()))
    assert policy[0].training and bare.training
    assert bare.config is own


@on_ranks(1)
def test_other_configs_arguments_and_what_is_no_model() -> None:
    provider, config = prepared()

    def on(other: Any) -> Callable[..., Any]:
        return lambda pre_process, post_process: provider(pre_process, post_process, other)

    refused(f"{OTHER_CONFIG} is the one passed in", on(config), config)
    for name in ("no_sync_func", "grad_sync_func", "param_sync_func"):
        other = OPTIONS.transformer_config()
        setattr(other, name, print)
        refused(f"{OTHER_CONFIG} has {name} of a model that trains", on(other), config)
    own = r"dtype is 'bf16', but .* a config of its own, with bf16: False, params_dtype: torch.float32"
    refused(own, on(OPTIONS.transformer_config()), config, dtype="bf16")

    parallel_state.destroy_model_parallel()
    refused("Megatron's parallel groups do not exist", provider, config)
    prepared()
    tensor_parallel.get_cuda_rng_tracker().reset()
    invalid, returned = partial(refused, error=InvalidInputError), "the model provider returned"
    invalid(f"{returned} a Linear without a config", lambda: torch.nn.Linear(1, 1), config)
    invalid(rf"{returned} \[", lambda **ends: [provider(**ends)], config)
    invalid(f"{returned} None", lambda config: None, config)
    invalid("dtype is 'fp8'; it can be 'bf16', 'fp16', 'fp32'", provider, config, dtype="fp8")
    on_meta = "perform_initialization=True with device='meta'"
    invalid(on_meta, provider, config, device="meta", perform_initialization=True)
    other = copy.copy(config)
    other.virtual_pipeline_model_parallel_size = other.tensor_model_parallel_size = 2
    invalid("config.virtual_pipeline_model_parallel_size is 2", provider, other)
    other.virtual_pipeline_model_parallel_size = None
    unseeded = "perform_initialization=True with tensor-parallel size 2 .* streams are not seeded"
    invalid(unseeded, provider, other, perform_initialization=True)


@on_ranks(1)
def test_providers_that_need_weights_are_named_with_the_remedy() -> None:
    provider, config = prepared()
    for misuse, reason in NEEDING_WEIGHTS.items():
        needing = partial(_misused, provider, misuse)
        name = r"the model provider functools.partial\(<function _misused at 0x"
        refused(f"{name}.*{reason}.*{INITIALIZE}$", needing, config)
        [model] = build_inference_model(needing, config, dtype="fp32", perform_initialization=True)
        assert float(model.output_layer.weight.std()) > 0
        assert not any(p.requires_grad or p.isnan().any() for p in model.parameters())
        assert not model.training
        assert getattr(model, "scale", 1) > 0
        reference = getattr(model, "reference", None)
        assert reference is None or reference() is model.output_layer.weight


class _Bridge:
    """Mixed into a config, as Megatron-Bridge does: the config provides the model."""

    def provide(self, pre_process: bool = True, post_process: bool = True) -> Any:
        return OPTIONS.provider(pre_process, post_process, config=self)


@on_ranks(1)
def test_hooks_before_wrapping_and_configs_of_ones_own() -> None:
    provider, config = prepared()
    seen: list[Any] = []

    @torch.no_grad()
    def load(chunks: list[Any]) -> None:
        seen.extend((type(chunk).__name__, chunk.output_layer.weight.dtype) for chunk in chunks)
        for chunk in chunks:
            torch._foreach_zero_(list(chunk.parameters()))

    [hooked] = build_inference_model(provider, config, dtype="bf16", pre_wrap=load)
    own = hooked.config
    assert own.bf16 and own.params_dtype == own.pipeline_dtype == own.autocast_dtype == torch.bfloat16
    assert seen == [("GPTModel", torch.bfloat16)]
    assert all(bool((p == 0).all()) for p in hooked.parameters())
    assert type(hooked).__name__ == "Float16Module"

    bridge_config = copy.copy(config)
    bridge_config.__class__ = type("Provider", (_Bridge, type(config)), {})
    [provided] = build_inference_model(bridge_config.provide, bridge_config, dtype="fp16")
    assert provided.module.output_layer.weight.dtype == torch.float16
    assert provided.config is not bridge_config

    with_own = lambda pre_process, post_process: provider(config=OPTIONS.transformer_config())  # noqa: E731
    [fresh] = build_inference_model(with_own, config, dtype="fp32")
    assert fresh.config is fresh.decoder.config is not config


@on_ranks(1)
def test_what_stays_in_float32_keeps_its_bits(tmp_path: Path) -> None:
    """Biases of routers, from hooks, checkpoints and pools; parameters that modules of Bridge name."""
    tiny = TinyModel(**EXPERTS, bf16=True)
    tiny.initialize()

    def provider(*args: Any, **kwargs: Any) -> Any:
        model = tiny.provider(*args, **kwargs)
        model.decoder.decay = torch.nn.Module()
        model.decoder.decay.A_log = torch.nn.Parameter(torch.ones(4))
        model.decoder.decay._keep_in_float32_parameter_names = ("A_log",)
        return model

    def in_float32(model: Any) -> list[torch.Tensor]:
        decoder = unwrap(model[0]).decoder
        return [decoder.decay.A_log, *(layer.mlp.router.expert_bias for layer in decoder.layers)]

    expected = 9 + torch.arange(4) / 100  # rounded to bfloat16, all would be 9

    def load(chunks: Any) -> None:
        fill_at_random(chunks)
        for tensor in in_float32(chunks):
            tensor.data.copy_(expected)

    def holds(model: Any) -> bool:
        return all(torch.equal(tensor.data, expected) for tensor in in_float32(model))

    build = partial(build_inference_model, provider, tiny.transformer_config(), dtype="bf16")
    hooked = build(pre_wrap=load)
    assert holds(hooked)
    assert {p.dtype for p in hooked[0].parameters()} == {torch.float32, torch.bfloat16}
    save(hooked, tmp_path)
    loaded = build()
    load_inference_checkpoint(loaded, tmp_path, exact=True)
    assert holds(loaded)
    # As get_model leaves it: routers turn their buffers back at the first pass.
    wrapped = Float16Module(hooked[0].config, provider()).requires_grad_(False)
    wrapped.module.decoder.decay.A_log.data = torch.ones(4)
    for model in (build(), [wrapped]):
        pool = TeacherPool(model)
        pool.add("teacher", tmp_path)
        for _ in range(2):
            with pool.use("teacher"):
                assert holds(pool.model) and scores_of(model)


@on_ranks(2)
def test_virtual_stages_are_those_of_the_groups() -> None:
    options = TinyModel(pp=2, vpp=2)
    options.initialize()
    config = options.transformer_config()
    config.virtual_pipeline_model_parallel_size = 4
    message = ".*parallel_size is 4, that of Megatron's parallel groups 2"
    refused(message, options.provider, config, error=InvalidInputError)
    config.virtual_pipeline_model_parallel_size = None
    chunks = build_inference_model(options.provider, config, dtype="fp32")
    assert [chunk.config.virtual_pipeline_model_parallel_size for chunk in chunks] == [2, 2]
