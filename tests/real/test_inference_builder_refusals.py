"""``build_inference_model``: what it refuses, with which message, and unusual providers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from megatron_rl_patches.testing import cpu_backend, spawn_ranks
from tests.real.small_models import (
    LAYOUTS,
    Layout,
    get_model,
    in_ddp,
    initialize,
    model_provider,
    transformer_config,
)


def _messages(layout: Layout) -> dict[str, str]:
    """The error of each misuse, by name."""
    import torch
    from megatron.core import parallel_state

    from megatron_rl_patches.errors import MegatronRLPatchesError
    from megatron_rl_patches.inference.models.model import build_inference_model

    errors: dict[str, str] = {}

    def attempt(name: str, provider: Any, config: Any, **arguments: Any) -> None:
        try:
            build_inference_model(provider, config, **{"dtype": "fp32", **arguments})
        except MegatronRLPatchesError as error:
            errors[name] = f"{type(error).__name__}: {error}"

    provider, config = model_provider(layout), transformer_config(layout, "fp32")
    parallel_state.destroy_model_parallel()
    attempt("groups", provider, config)
    initialize(layout)
    policy = in_ddp(get_model(provider, config, layout), config)
    attempt("ddp", lambda **given: in_ddp([provider(**given)], given["config"])[0], config)
    attempt("policy", lambda **given: policy[0], config)
    attempt("bare policy", lambda **given: policy[0].module, config)
    bare = provider(config=(own := transformer_config(layout, "fp32")))
    for on_device in (False, True):
        attempt(f"cached policy, {on_device}", lambda **given: bare, config, perform_initialization=on_device)
        shared = partial(_with_weight_of, provider, bare)
        attempt(f"weight of a policy, {on_device}", shared, config, perform_initialization=on_device)
    for name, misuse in _NEEDING_WEIGHTS.items():
        attempt(name, partial(_misused, provider, misuse), config)
    attempt("initialized on meta", provider, config, device="meta", perform_initialization=True)
    attempt("closure", lambda pre_process, post_process: provider(config=config), config)
    for name in ("no_sync_func", "grad_sync_func", "param_sync_func"):
        others = transformer_config(layout, "fp32")
        setattr(others, name, print)
        attempt(f"a policy's {name}", partial(_on_config, provider, others), config)
    others = transformer_config(layout, "fp32")
    attempt("another dtype", partial(_on_config, provider, others), config, dtype="bf16")
    attempt("no config", lambda: torch.nn.Linear(1, 1), config)
    attempt("list", lambda **given: [provider(**given)], config)
    ddp = type("DistributedDataParallel", (torch.nn.Module,), {})  # known by its name
    for kind in (ddp, type("V3", (ddp,), {}), type("FSDPModule", (torch.nn.Module,), {})):
        attempt(kind.__name__, lambda kind=kind: torch.nn.Sequential(kind()), config)
    attempt("dtype", provider, config, dtype="fp8")
    attempt("none", lambda config: None, config)
    attempt("vpp", provider, config, virtual_pipeline_size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda *args: (7, 0))
        attempt("bf16", provider, config, dtype="bf16")
    errors["still trains"] = str(
        all(p.requires_grad for p in (*policy[0].parameters(), *bare.parameters()))
        and policy[0].training
        and bare.training
        and bare.config is own
    )
    return errors


def _read_it(model: Any, weight: Any) -> None:
    model.scale = float(weight.abs().max())


def _make_a_buffer_of_it(model: Any, weight: Any) -> None:
    model.decoder.register_buffer("norms", weight.detach().norm(dim=1))


def _keep_an_alias(model: Any, weight: Any) -> None:
    model.flat = weight.detach().view(-1)


def _refer_to_it_weakly(model: Any, weight: Any) -> None:
    model.reference = weakref.ref(weight)


#: What providers do with a weight that needs more of it than shape and dtype.
_NEEDING_WEIGHTS = {
    "reads a weight": _read_it,
    "buffer of a weight": _make_a_buffer_of_it,
    "alias of a weight": _keep_an_alias,
    "weak reference": _refer_to_it_weakly,
}


def _misused(provider: Any, misuse: Any, config: Any, pre_process: bool, post_process: bool) -> Any:
    model = provider(pre_process, post_process, config=config)
    misuse(model, model.output_layer.weight)
    return model


def _with_weight_of(provider: Any, policy: Any, config: Any, pre_process: bool, post_process: bool) -> Any:
    model = provider(pre_process, post_process, config=config)
    model.output_layer.weight = policy.output_layer.weight
    return model


def _on_config(provider: Any, config: Any, pre_process: bool, post_process: bool) -> Any:
    return provider(pre_process, post_process, config=config)


def _virtual_stages() -> dict[str, str]:
    from megatron_rl_patches.errors import InvalidInputError
    from megatron_rl_patches.inference.models.model import build_inference_model

    interleaved, errors = LAYOUTS["PP 2, VPP 2"], {}
    provider, config = model_provider(interleaved), transformer_config(interleaved, "fp32")
    silent = copy.copy(config)
    silent.virtual_pipeline_model_parallel_size = None
    for name, groups, given, asked in (
        ("asked for another", interleaved, config, 4),
        ("groups without", Layout(pp=2), config, None),
        ("asked for", interleaved, silent, 2),
        ("by the groups", interleaved, silent, None),
    ):
        initialize(groups)
        try:
            chunks = build_inference_model(provider, given, dtype="fp32", virtual_pipeline_size=asked)
            errors[name] = f"{len(chunks)} of {chunks[0].config.virtual_pipeline_model_parallel_size}"
        except InvalidInputError as error:
            errors[name] = str(error)
    return errors


class _Bridge:
    """Mixed into a config, as Megatron-Bridge does: the config provides the model."""

    def provide(self, pre_process: bool = True, post_process: bool = True) -> Any:
        return model_provider(Layout())(pre_process, post_process, config=self)


def _special_cases() -> dict[str, Any]:
    import torch

    from megatron_rl_patches.inference.models.model import build_inference_model

    layout = Layout()
    initialize(layout)
    config, provider = transformer_config(layout, "fp32"), model_provider(layout)
    seen: list[Any] = []

    @torch.no_grad()
    def load(chunks: list[Any]) -> None:
        seen.extend((type(chunk).__name__, chunk.output_layer.weight.dtype) for chunk in chunks)
        for chunk in chunks:
            torch._foreach_zero_(list(chunk.parameters()))

    hooked = build_inference_model(provider, config, dtype="bf16", pre_wrap=load)
    bridge_config = copy.copy(config)
    bridge_config.__class__ = type("Provider", (_Bridge, type(config)), {})
    provided = build_inference_model(bridge_config.provide, bridge_config, dtype="fp16")
    fresh = build_inference_model(
        lambda pre_process, post_process: provider(config=transformer_config(layout, "fp32")),
        config,
        dtype="fp32",
    )
    initialized = {
        name: build_inference_model(
            partial(_misused, provider, misuse), config, dtype="fp32", perform_initialization=True
        )[0]
        for name, misuse in _NEEDING_WEIGHTS.items()
    }
    return {
        "pre_wrap": seen,
        "loaded in it": all(bool((p == 0).all()) for p in hooked[0].parameters()),
        "wrapped after it": type(hooked[0]).__name__,
        "bridge": (provided[0].module.output_layer.weight.dtype, provided[0].config is not bridge_config),
        "own config": fresh[0].config is fresh[0].decoder.config is not config,
        "initialized": [
            float(one.output_layer.weight.std()) > 0
            and not any(p.requires_grad or p.isnan().any() for p in one.parameters())
            and not one.training
            for one in initialized.values()
        ],
        "read": initialized["reads a weight"].scale > 0,
        "referred to": initialized["weak reference"].reference()
        is initialized["weak reference"].output_layer.weight,
    }


def _one_rank() -> tuple[dict[str, str], dict[str, Any]]:
    with cpu_backend():
        return _messages(Layout()), _special_cases()


@pytest.fixture(scope="module")
def one_rank() -> tuple[dict[str, str], dict[str, Any]]:
    [result] = spawn_ranks(_one_rank, 1, timeout=120)
    return result


REFUSED = "InferenceOnlyError: the model provider functools.partial(<function _misused at 0x"
INITIALIZE = "pass perform_initialization=True, with which parameters are constructed on the device"
OTHER_CONFIG = "InferenceOnlyError: the model provider does not build on the config that it is called with"


@pytest.mark.parametrize(
    ("misuse", "message"),
    {
        "groups": "InferenceOnlyError: Megatron's parallel groups do not exist",
        "ddp": "InferenceOnlyError: the model provider wraps the model in DistributedDataParallel",
        "policy": "InferenceOnlyError: the model provider returned a model in DistributedDataParallel",
        "bare policy": "InferenceOnlyError: the model provider returned a model whose parameter",
        "closure": f"{OTHER_CONFIG}, but on one that is the one passed in",
        "a policy's no_sync_func": f"{OTHER_CONFIG}, but on one that has no_sync_func of a model that trains",
        "a policy's grad_sync_func": f"{OTHER_CONFIG}, but on one that has grad_sync_func of a model that",
        "a policy's param_sync_func": f"{OTHER_CONFIG}, but on one that has param_sync_func of a model that",
        "another dtype": "InferenceOnlyError: dtype is 'bf16', but the model provider builds on a config of "
        "its own, with bf16: False, params_dtype: torch.float32",
        "no config": "InvalidInputError: the model provider returned a Linear without a config",
        "list": "InvalidInputError: the model provider returned [",
        "DistributedDataParallel": "InferenceOnlyError: the model provider returned a model in Distributed",
        "V3": "InferenceOnlyError: the model provider returned a model in V3, which trains",
        "FSDPModule": "InferenceOnlyError: the model provider returned a model in FSDPModule",
        "dtype": "InvalidInputError: dtype is 'fp8'; it can be 'bf16', 'fp16', 'fp32'",
        "none": "InvalidInputError: the model provider returned None",
        "initialized on meta": "InvalidInputError: perform_initialization=True with device='meta'",
        "vpp": "InvalidInputError: virtual_pipeline_size: 2",
        "bf16": "InvalidInputError: dtype is 'bf16', which CPU does not compute with",
    }.items(),
)
def test_refusals(misuse: str, message: str, one_rank: Any) -> None:
    assert one_rank[0][misuse].startswith(message)


@pytest.mark.parametrize(
    ("misuse", "reason"),
    {
        "reads a weight": "reads a weight while it builds the model (RuntimeError: Tensor.item() cannot",
        "buffer of a weight": "makes decoder.norms from a weight while it builds the model",
        "alias of a weight": "makes flat from a weight while it builds the model",
        "weak reference": "holds another reference to output_layer.weight than modules do (RuntimeError: ",
    }.items(),
)
def test_providers_that_need_weights_are_named_with_the_remedy(
    misuse: str, reason: str, one_rank: Any
) -> None:
    message = one_rank[0][misuse]
    assert message.startswith(REFUSED)
    assert reason in message and message.endswith(INITIALIZE)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("misuse", ["cached policy", "weight of a policy"])
def test_weights_of_a_policy_are_refused(misuse: str, on_device: bool, one_rank: Any) -> None:
    message = one_rank[0][f"{misuse}, {on_device}"]
    assert message.startswith("InferenceOnlyError: the model provider ")
    assert message.endswith("weight, which it has not just created: build and return a new model")


def test_a_policy_that_was_refused_still_trains(one_rank: Any) -> None:
    assert one_rank[0]["still trains"] == "True"


def test_special_cases(one_rank: Any) -> None:
    import torch

    assert one_rank[1] == {
        "pre_wrap": [("GPTModel", torch.bfloat16)],
        "loaded in it": True,
        "wrapped after it": "Float16Module",
        "bridge": (torch.float16, True),
        "own config": True,
        "initialized": [True] * 4,
        "read": True,
        "referred to": True,
    }


def _in_cpu_backend(function: Callable[[], Any]) -> Any:
    with cpu_backend():
        return function()


def test_virtual_stages_must_fit() -> None:
    for errors in spawn_ranks(partial(_in_cpu_backend, _virtual_stages), 2, timeout=120):
        of_config = "config.virtual_pipeline_model_parallel_size: 2"
        assert errors["asked for another"].startswith(f"virtual_pipeline_size: 4, {of_config}")
        assert f"{of_config}, Megatron's parallel groups: None; these do not" in errors["groups without"]
        assert errors["asked for"] == errors["by the groups"] == "2 of 2"
