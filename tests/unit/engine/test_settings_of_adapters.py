"""Adapters that ask for settings get those that their patch was last applied with; sites that only tell."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from megatron_rl_patches import PatchError, Settings, applied, apply, revert, status
from megatron_rl_patches.engine import installer
from megatron_rl_patches.engine.spec import Patch

from .conftest import patch_of, tag

Host = Callable[..., str]
Engine = dict[str, Patch]


def roles(wrapped: Any, instance: Any, args: Any, kwargs: Any, *, settings: Settings) -> Any:
    return settings.inference_roles


ONE, OTHER = Settings(inference_roles=("one",)), Settings(inference_roles=("other",))


@pytest.fixture
def train(host: Host, engine: Engine) -> Callable[[], Any]:
    name = host()
    engine["roles"] = patch_of(name, "train", name="roles", adapter=roles, with_settings=True)
    engine["tagging"] = patch_of(name, "save")
    module = importlib.import_module(f"{name}.model")
    return lambda: module.train("m")


def test_the_last_that_were_given(train: Callable[[], Any]) -> None:
    apply(settings=ONE)
    assert train() == ("one",)
    apply(settings=OTHER)
    assert train() == ("other",)
    apply()  # says nothing of settings
    assert train() == ("other",)
    apply("tagging", settings=ONE)  # of another patch
    assert train() == ("other",)


def test_the_environment_when_none_are_given(
    train: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_RL_PATCHES_INFERENCE_ROLES", "judge")
    apply()
    assert train() == ("judge",)
    apply(settings=ONE)
    revert()
    apply()
    assert train() == ("judge",)


def test_a_block_gives_them_back(train: Callable[[], Any]) -> None:
    apply(settings=ONE)
    with applied(settings=OTHER):
        assert train() == ("other",)
    assert train() == ("one",)


def test_refused_settings_do_not_stay(train: Callable[[], Any], engine: Engine, host: Host) -> None:
    apply(settings=ONE)
    broken = patch_of(host(), "train", name="broken", uses=("no such",))
    importlib.import_module(broken.sites[0].module)
    with pytest.raises(PatchError):
        installer.installer.add([engine["roles"], broken], OTHER, must=True)
    assert train() == ("one",)


def tells(facts: Any) -> str | None:
    return "it is right already" if "trained" in str(facts.function.body[-1].value.elts[0].value) else None


@pytest.mark.parametrize("qualname", ["train", "save", "no_such"])
def test_sites_that_only_tell(host: Host, engine: Engine, qualname: str) -> None:
    name = host()
    engine["tagging"] = patch_of(name, qualname, not_needed=tells, only_tells=True)
    apply("tagging")
    assert not installer.installer._imports._hooked
    [before] = status()
    module = importlib.import_module(f"{name}.model")
    [after] = status()
    assert before == after
    assert before.state == "not needed"
    assert before.reason.startswith(
        "it is right already" if qualname == "train" else "nothing to do is known"
    )
    assert module.train("m") == ("trained", "m", 1)


def test_a_host_that_only_tells_may_be_absent(engine: Engine) -> None:
    engine["tagging"] = Patch("tagging", "")
    engine["tagging"].wrap("no_such_host.model", "train", not_needed=tells, only_tells=True)(tag)
    apply("tagging")
    assert [site.state for site in status()] == ["waiting"]


def test_it_does_not_hold_back_the_others(host: Host, engine: Engine) -> None:
    name = host(actor="def broken(:")
    patch = patch_of(name, "train")
    patch.wrap(f"{name}.actor", "load", not_needed=tells, only_tells=True)(tag)
    engine["tagging"] = patch
    apply("tagging")
    assert importlib.import_module(f"{name}.model").train("m")[0] == "patched"
    assert {site.state for site in status()} == {"applied", "not needed"}
