"""The parts of the builder: how providers are called and judged, and copies of configs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core import ModelParallelConfig
from torch.nn import Linear, Module

from megatron_rl_patches.errors import InferenceOnlyError, InvalidInputError
from megatron_rl_patches.inference.build import provider as _provider
from megatron_rl_patches.inference.build.model import freeze, without_training
from megatron_rl_patches.inference.build.provider import call_provider, give_own_config, inference_copy

ARGUMENTS = {"pre_process": True, "post_process": False, "config": "own", "pg_collection": "groups"}


_config = ModelParallelConfig


class _Chunk(Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.layer = Linear(2, 2)
        self.layer.config = config


# --- how a provider is called


class _Callable:
    def __call__(self, pre_process: bool, post_process: bool) -> Any:
        return {"pre_process": pre_process, "post_process": post_process}


def _only_ends(pre_process: bool = True, post_process: bool = True) -> Any:
    return {"pre_process": pre_process, "post_process": post_process}


def _with_config(config: Any, pre_process: bool, *, post_process: bool, other: int = 0) -> Any:
    return {"config": config, "pre_process": pre_process, "post_process": post_process}


def _anything(**kwargs: Any) -> Any:
    return kwargs


@functools.wraps(_only_ends)
def _honest_wrapper(*args: Any, **kwargs: Any) -> Any:
    return _only_ends(*args, **kwargs)


@pytest.mark.parametrize(
    ("provider", "gets"),
    [
        (_only_ends, {"pre_process", "post_process"}),
        (_Callable(), {"pre_process", "post_process"}),
        (_honest_wrapper, {"pre_process", "post_process"}),
        (_with_config, {"pre_process", "post_process", "config"}),
        (functools.partial(_with_config, config="a policy's"), {"pre_process", "post_process", "config"}),
        (_anything, set(ARGUMENTS)),
    ],
)
def test_a_provider_gets_what_it_takes(provider: Callable[..., Any], gets: set[str]) -> None:
    assert call_provider(provider, ARGUMENTS) == {name: ARGUMENTS[name] for name in gets}


def test_virtual_stages_by_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_provider, "_STAGES_BY_ARGUMENT", True)
    assert call_provider(lambda vp_stage: vp_stage, {"vp_stage": 1}) == 1
    assert call_provider(_anything, {"vp_stage": 1}) == {"vp_stage": 1}
    with pytest.raises(InvalidInputError, match="takes no vp_stage"):
        call_provider(_only_ends, {**ARGUMENTS, "vp_stage": 1})


def test_virtual_stages_by_a_global(monkeypatch: pytest.MonkeyPatch) -> None:
    stage: list[Any] = [None]
    state = _provider.parallel_state
    monkeypatch.setattr(_provider, "_STAGES_BY_ARGUMENT", False)
    monkeypatch.setattr(state, "get_virtual_pipeline_model_parallel_rank", lambda: stage[-1])
    monkeypatch.setattr(state, "set_virtual_pipeline_model_parallel_rank", stage.append)
    assert call_provider(lambda **kwargs: (kwargs, stage[-1]), {"vp_stage": 1}) == ({}, 1)
    with pytest.raises(ZeroDivisionError):
        call_provider(lambda: 1 // 0, {"vp_stage": 1})
    assert stage == [None, 1, None, 1, None]


# --- configs


def test_a_copy_has_nothing_of_training_on_it() -> None:
    config = _config()
    hooks = (
        "no_sync_func",
        "grad_sync_func",
        "param_sync_func",
        "finalize_model_grads_func",
        "grad_scale_func",
    )
    for name in (*hooks, "timers"):
        setattr(config, name, print)
    before = dict(vars(config))
    own = without_training(config)
    assert all(getattr(own, name) is None for name in (*hooks, "timers"))
    assert own is not config and vars(config) == before
    assert type(own) is ModelParallelConfig


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("was", [{}, {"bf16": True, "params_dtype": torch.bfloat16}])
def test_the_dtype_is_the_copys(dtype: str, was: dict[str, Any]) -> None:
    own = inference_copy(_config(**was), dtype)
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    assert (own.bf16, own.fp16) == (dtype == "bf16", dtype == "fp16")
    assert own.params_dtype == own.pipeline_dtype == own.autocast_dtype == wanted


def test_members_that_cannot_be_copied_are_shared() -> None:
    config = _config()
    config.lock = threading.Lock()
    assert without_training(config).lock is config.lock


def test_a_provider_with_a_config_of_its_own_gets_a_copy_of_that() -> None:
    given, made = _config(), _config(barrier_with_L1_time=False)
    chunk = _Chunk(made)
    give_own_config(chunk, inference_copy(given, "fp32"), given, "fp32")
    assert chunk.config is chunk.layer.config
    assert chunk.config is not given and chunk.config is not made
    assert not chunk.config.barrier_with_L1_time


@pytest.mark.parametrize(
    ("installed", "why"),
    [({}, "is the one passed in"), ({"no_sync_func": print}, "has no_sync_func of a model that trains")],
)
def test_a_provider_that_builds_on_the_config_passed_in(installed: dict[str, Any], why: str) -> None:
    given = _config(**installed)
    with pytest.raises(InferenceOnlyError, match=f"{why}.*give the provider a parameter `config`"):
        give_own_config(_Chunk(given), inference_copy(given, "fp32"), given, "fp32")


@pytest.mark.parametrize("name", ["no_sync_func", "grad_sync_func", "param_sync_func"])
def test_a_provider_that_builds_on_a_policys_config(name: str) -> None:
    given, policys = _config(), _config(**{name: print})
    with pytest.raises(InferenceOnlyError, match=f"has {name} of a model that trains"):
        give_own_config(_Chunk(policys), inference_copy(given, "fp32"), given, "fp32")


def test_a_provider_that_ignores_the_dtype() -> None:
    given = _config()
    with pytest.raises(InferenceOnlyError, match=r"dtype is 'bf16'.*params_dtype: torch.float32"):
        give_own_config(_Chunk(_config()), inference_copy(given, "bf16"), given, "bf16")


def test_a_model_without_a_config() -> None:
    with pytest.raises(InvalidInputError, match="Linear without a config"):
        give_own_config(Linear(1, 1), _config(), _config(), "fp32")


# --- what a provider returns


class DistributedDataParallel(Module):
    """Known by its name, since newer releases make a function of one such class."""


class _FullyShardedDataParallelV3(DistributedDataParallel):
    pass


def _with_gradient_buffer() -> Module:
    module = Linear(1, 1)
    module.bias.main_grad = torch.zeros(1)
    return module


@pytest.mark.parametrize(
    ("returned", "error", "why"),
    [
        (None, InvalidInputError, "returned None"),
        ([Linear(1, 1)], InvalidInputError, "must return one torch.nn.Module per call"),
        (DistributedDataParallel(), InferenceOnlyError, "in DistributedDataParallel, which trains"),
        (torch.nn.Sequential(_FullyShardedDataParallelV3()), InferenceOnlyError, "V3, which trains"),
        (_with_gradient_buffer(), InferenceOnlyError, "parameter bias has a gradient buffer"),
    ],
)
def test_what_a_provider_must_not_return(returned: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        _provider.require_inference_chunk(returned)


def test_freeze() -> None:
    model = [Linear(1, 1).train(), Linear(1, 1).train()]
    freeze(model)
    assert not any(module.training for chunk in model for module in chunk.modules())
    assert not any(parameter.requires_grad for chunk in model for parameter in chunk.parameters())
