"""How providers are called, and copies of configs; what is refused is in tests/real."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core import ModelParallelConfig

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference.models import provider as _provider
from megatron_rl_patches.inference.models.provider import call_provider, inference_copy, without_training

ARGUMENTS = {"pre_process": True, "post_process": False, "config": "own", "pg_collection": "groups"}


def _only_ends(pre_process: bool = True, post_process: bool = True) -> Any:
    return {"pre_process": pre_process, "post_process": post_process}


class _Callable:
    def __call__(self, pre_process: bool, post_process: bool) -> Any:
        return _only_ends(pre_process, post_process)


def _with_config(config: Any, pre_process: bool, *, post_process: bool, other: int = 0) -> Any:
    return {"config": config, **_only_ends(pre_process, post_process)}


def _anything(**kwargs: Any) -> Any:
    return kwargs


ENDS = {"pre_process", "post_process"}


@pytest.mark.parametrize(
    ("provider", "gets"),
    [
        (_only_ends, ENDS),
        (_Callable(), ENDS),
        (functools.wraps(_only_ends)(lambda *args, **kwargs: _only_ends(*args, **kwargs)), ENDS),
        (_with_config, {*ENDS, "config"}),
        (functools.partial(_with_config, config="a policy's"), {*ENDS, "config"}),
        (_anything, set(ARGUMENTS)),
    ],
)
def test_a_provider_gets_what_it_takes(provider: Callable[..., Any], gets: set[str]) -> None:
    assert call_provider(provider, ARGUMENTS) == {name: ARGUMENTS[name] for name in gets}


def test_virtual_stages_by_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    assert call_provider(lambda vp_stage: vp_stage, {"vp_stage": 1}) == 1
    assert call_provider(_anything, {"vp_stage": 1}) == {"vp_stage": 1}
    with pytest.raises(InvalidInputError, match="takes no vp_stage"):
        call_provider(_only_ends, {**ARGUMENTS, "vp_stage": 1})


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("was", [{}, {"bf16": True, "params_dtype": torch.bfloat16}])
def test_the_dtype_is_the_copys(dtype: str, was: dict[str, Any]) -> None:
    own = inference_copy(ModelParallelConfig(**was), dtype)
    assert (own.bf16, own.fp16) == (dtype == "bf16", dtype == "fp16")
    assert own.params_dtype == own.pipeline_dtype == own.autocast_dtype == _provider.DTYPES[dtype]


def test_members_that_cannot_be_copied_are_shared() -> None:
    config = ModelParallelConfig()
    config.lock = threading.Lock()
    assert without_training(config).lock is config.lock
