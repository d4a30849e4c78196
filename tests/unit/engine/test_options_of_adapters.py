"""Adapters get the options that their patch was last applied with."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from megatron_rl_patches import PatchError, Settings, apply, revert
from megatron_rl_patches.engine import installer

from .conftest import Engine, Framework, patch_of, roles


@pytest.fixture
def one(train: Callable[[], Any]) -> Settings:
    return Settings(inference_roles=("one",))


@pytest.fixture
def other(train: Callable[[], Any]) -> Settings:
    return Settings(inference_roles=("other",))


@pytest.fixture
def train(framework: Framework, engine: Engine) -> Callable[[], Any]:
    name = framework()
    engine["roles"] = patch_of(name, "train", name="roles", adapter=roles)
    engine["tagging"] = patch_of(name, "save")
    module = importlib.import_module(f"{name}.model")
    return lambda: module.train("m")


def test_the_last_that_were_given(train: Callable[[], Any], one: Settings, other: Settings) -> None:
    apply(settings=one)
    assert train() == ("one",)
    apply(settings=other)
    assert train() == ("other",)
    apply()  # says nothing of settings
    assert train() == ("other",)
    apply("tagging", settings=one)  # of another patch
    assert train() == ("other",)


def test_the_environment_when_none_are_given(
    train: Callable[[], Any], one: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_RL_PATCHES_INFERENCE_ROLES", "judge")
    apply()
    assert train() == ("judge",)
    apply(settings=one)
    revert()
    apply()
    assert train() == ("judge",)


def test_refused_settings_do_not_stay(
    train: Callable[[], Any], one: Settings, other: Settings, engine: Engine, framework: Framework
) -> None:
    apply(settings=one)
    broken = patch_of(framework(), "train", name="broken", parameters=("no such",))
    importlib.import_module(broken.sites[0].module)
    with pytest.raises(PatchError):
        installer.installer.add([engine["roles"], broken], other, required=True)
    assert train() == ("one",)
