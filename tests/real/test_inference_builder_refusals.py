"""``build_inference_model``: what it refuses, with which message, and unusual providers."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel

from megatron_rl_patches.errors import InferenceOnlyError, InvalidInputError
from megatron_rl_patches.inference import build_inference_model
from megatron_rl_patches.testing import TinyModel
from tests.ranks import on_ranks
from tests.real.test_inference_builder import in_ddp

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
    """A provider and a config."""
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
    lambda model, weight: setattr(model, "flat", weight.detach().view(-1)): (
        "makes flat from a weight while it builds the model"
    ),
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
    policy = in_ddp(OPTIONS.chunks(config), config)
    returned = "the model provider returned a model"
    wrapping = "the model provider wraps the model in DistributedDataParallel"
    refused(wrapping, lambda **ends: in_ddp([provider(**ends)], ends["config"])[0], config)
    refused(f"{returned} in DistributedDataParallel", lambda **_: policy[0], config)
    refused(f"{returned} whose parameter", lambda **_: policy[0].module, config)
    ddp = type("DistributedDataParallel", (torch.nn.Module,), {})  # known by its name
    for kind in (ddp, type("V3", (ddp,), {}), type("FSDPModule", (torch.nn.Module,), {})):
        in_it = f"{returned} in {kind.__name__}, which trains"
        refused(in_it, lambda kind=kind: torch.nn.Sequential(kind()), config)

    own = OPTIONS.transformer_config()
    bare = provider(config=own)
    not_new = "the model provider .*weight, which it has not just created: build and return a new model$"
    shared = partial(
        _misused, provider, lambda model, _: setattr(model.output_layer, "weight", bare.output_layer.weight)
    )
    for on_device in (False, True):
        refused(not_new, lambda **_: bare, config, perform_initialization=on_device)
        refused(not_new, shared, config, perform_initialization=on_device)
    # The policies that were refused still train.
    assert all(p.requires_grad for p in (*policy[0].parameters(), *bare.parameters()))
    assert policy[0].training and bare.training
    assert bare.config is own


@on_ranks(1)
def test_configs_of_other_models() -> None:
    provider, config = prepared()

    def on(other: Any) -> Callable[..., Any]:
        return lambda pre_process, post_process: provider(pre_process, post_process, other)

    refused(f"{OTHER_CONFIG} is the one passed in", on(config), config)
    for name in ("no_sync_func", "grad_sync_func", "param_sync_func"):
        other = OPTIONS.transformer_config()
        setattr(other, name, print)
        refused(f"{OTHER_CONFIG} has {name} of a model that trains", on(other), config)
    own = (
        "dtype is 'bf16', but the model provider builds on a config of its own, with bf16: False, "
        "params_dtype: torch.float32"
    )
    refused(own, on(OPTIONS.transformer_config()), config, dtype="bf16")


@on_ranks(1)
def test_arguments_and_what_is_no_model() -> None:
    provider, config = prepared()
    parallel_state.destroy_model_parallel()
    refused("Megatron's parallel groups do not exist", provider, config)
    provider, config = prepared()
    returned = "the model provider returned"
    invalid = partial(refused, config=config, error=InvalidInputError)
    invalid(f"{returned} a Linear without a config", lambda: torch.nn.Linear(1, 1))
    invalid(rf"{returned} \[", lambda **ends: [provider(**ends)])
    invalid(f"{returned} None", lambda config: None)
    invalid("dtype is 'fp8'; it can be 'bf16', 'fp16', 'fp32'", provider, dtype="fp8")
    on_meta = "perform_initialization=True with device='meta'"
    invalid(on_meta, provider, device="meta", perform_initialization=True)
    invalid("virtual_pipeline_size: 2", provider, virtual_pipeline_size=2)
    divided = copy.copy(config)
    divided.tensor_model_parallel_size = 2
    tensor_parallel.get_cuda_rng_tracker().reset()
    unseeded = "perform_initialization=True with tensor-parallel size 2 .* streams are not seeded"
    invalid(unseeded, provider, config=divided, perform_initialization=True)
    with mock.patch.object(torch.cuda, "get_device_capability", lambda *args: (7, 0)):
        invalid("dtype is 'bf16', which CPU does not compute with", provider, dtype="bf16")


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


@on_ranks(2)
def test_virtual_stages_must_fit() -> None:
    options = TinyModel(pp=2, vpp=2, overlap_param_gather=False)
    provider, config = options.provider, options.transformer_config()
    of_config = "config.virtual_pipeline_model_parallel_size: 2"
    invalid = partial(refused, error=InvalidInputError)
    options.initialize()
    invalid(f"virtual_pipeline_size: 4, {of_config}", provider, config, virtual_pipeline_size=4)
    silent = copy.copy(config)
    silent.virtual_pipeline_model_parallel_size = None
    for size in (2, None):  # None: as the groups have it
        chunks = build_inference_model(provider, silent, dtype="fp32", virtual_pipeline_size=size)
        assert [chunk.config.virtual_pipeline_model_parallel_size for chunk in chunks] == [2, 2]
    TinyModel(pp=2, seed=7).initialize()
    invalid(f".*{of_config}, Megatron's parallel groups: None; these do not", provider, config)
