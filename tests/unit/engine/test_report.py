"""What is told of states, word by word: people search for these lines."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from megatron_rl_patches import Settings, __version__, apply, status
from megatron_rl_patches.engine import announce, registry
from megatron_rl_patches.engine.installer import refusal
from megatron_rl_patches.engine.report import SiteStatus, summary
from megatron_rl_patches.engine.sources import open_source
from megatron_rl_patches.engine.spec import Patch
from megatron_rl_patches.engine.survey import survey
from megatron_rl_patches.errors import PatchError

from .conftest import patch_of, tag

Host = Callable[..., str]
Engine = dict[str, Patch]


def site(patch: str, host: str, state: str, function: str = "train") -> SiteStatus:
    return SiteStatus(patch, host, f"{host}.{function}", state, "a reason")  # type: ignore[arg-type]


def test_summary() -> None:
    told = [
        site("one", "slime", "applied"),
        site("one", "slime", "applied", "save"),
        site("one", "verl", "missing"),
        site("one", "miles", "waiting"),
        site("two", "slime", "waiting"),
    ]
    assert summary(told, "1.2") == (
        "megatron_rl_patches 1.2: one (slime: 2 applied, verl: 1 missing); two (waiting for a host)"
    )
    assert summary([], "1.2") == "megatron_rl_patches 1.2: nothing selected"


def test_refusal() -> None:
    [first, second] = faults = [site("one", "slime", "missing"), site("one", "slime", "drifted", "save")]
    assert str(refusal(faults)) == (
        f"cannot take effect:\n  {first}\n  {second}\nThe code of the host is not what the patch was written "
        "for. Exclude the patch (apply(exclude=...), MEGATRON_RL_PATCHES=all,-NAME), or use a release in "
        "docs/compatibility.md."
    )


class TestAtExit:
    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.delenv("RANK", raising=False)
        monkeypatch.setattr(announce, "done", False)
        caplog.set_level(logging.INFO, "megatron_rl_patches")

    def test_nothing_was_in_place(self, caplog: pytest.LogCaptureFixture) -> None:
        announce.at_exit([site("one", "slime", "waiting"), site("one", "slime", "reverted")])
        assert caplog.messages == []

    def test_a_host_that_is_not_used_is_not_complained_of(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(announce, "_warned", set())
        monkeypatch.setitem(sys.modules, "somehost", ModuleType("somehost"))
        announce.once([site("one", "somehost", "missing"), site("one", "unused", "missing")])
        assert [line for line in caplog.messages if "skipped" in line] == [
            "megatron_rl_patches: skipped one: somehost.train: missing: a reason"
        ]

    def test_summary_with_this_version(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "somehost", ModuleType("somehost"))
        announce.at_exit([site("one", "somehost", "applied"), site("one", "unused", "applied")])
        assert caplog.messages == [f"megatron_rl_patches {__version__}: one (somehost: 1 applied)"]

    def test_hosts_of_which_the_patched_modules_never_came(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "somehost", ModuleType("somehost"))
        announce.at_exit([site("one", "somehost", "waiting", name) for name in ("train", "save")])
        assert caplog.messages == [
            "megatron_rl_patches: these were never imported by this process, so nothing was patched there: "
            "somehost.train, somehost.save"
        ]


class TestRank:
    @pytest.fixture(autouse=True)
    def nothing_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(announce, "_warned", set())

    @pytest.mark.parametrize(
        ("variable", "speaks"), [("0", True), ("1", False), ("-1", True), ("x", True), (None, True)]
    )
    def test_by_variable(
        self,
        variable: str | None,
        speaks: bool,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setenv("RANK", variable) if variable else monkeypatch.delenv("RANK", raising=False)
        announce.warn([site("one", f"host{variable}", "missing")])
        assert bool(caplog.messages) is speaks

    @pytest.mark.parametrize(
        ("available", "initialized", "speaks"),
        [(True, True, False), (True, False, True), (False, True, True)],
    )
    def test_by_process_group(
        self,
        available: bool,
        initialized: bool,
        speaks: bool,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        distributed = SimpleNamespace(
            is_available=lambda: available, is_initialized=lambda: initialized, get_rank=lambda: 2
        )
        monkeypatch.setitem(sys.modules, "torch.distributed", distributed)  # type: ignore[arg-type]
        monkeypatch.setenv("RANK", "0")
        announce.warn([site("one", f"{available}{initialized}", "missing")])
        assert bool(caplog.messages) is speaks

    def test_without_torch(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
        monkeypatch.setenv("RANK", "1")
        announce.warn([site("one", "without", "missing")])
        assert caplog.messages == []


def test_survey_tells_every_site_of_every_patch(host: Host, tmp_path: Path) -> None:
    name = host()
    patches = [patch_of(name, "train", "gone"), patch_of(name, "save", name="other")]
    patches[1].wrap("nowhere.model", "train")(tag)
    findings = survey(open_source(f"checkout={tmp_path}"), patches, Settings())
    gone = f"{name}.model.gone: {name}.model does not define gone"
    told = [(f.patch, f.host, f.target, f.state, f.reason) for f in findings]
    assert told == [
        ("tagging", name, f"{name}.model.train", "missing", f"held back: {gone}"),
        ("tagging", name, f"{name}.model.gone", "missing", gone.partition(": ")[2]),
        ("other", name, f"{name}.model.save", "fits", "has the fault that the patch mends"),
        ("other", "nowhere", "nowhere.model.train", "absent", "no nowhere in checkout"),
    ]
    assert [bool(f.fingerprint) for f in findings] == [False, False, True, False]


class TestLost:
    def test_overwritten(self, host: Host, engine: Engine) -> None:
        name = host()
        engine["tagging"] = patch_of(name, "train")
        apply()
        module = importlib.import_module(f"{name}.model")

        def mine(model: object) -> None: ...

        module.train = mine
        [told] = status()
        assert (told.state, told.reason) == (
            "lost",
            f"overwritten by {__name__}.TestLost.test_overwritten.<locals>.mine; "
            "in force only if that calls what it replaced",
        )
        module.train = 1
        [told] = status()
        assert told.reason.startswith("overwritten by ?.?;")

    def test_gone(self, host: Host, engine: Engine) -> None:
        name = host()
        engine["tagging"] = patch_of(name, "train")
        apply()
        del importlib.import_module(f"{name}.model").train
        [told] = status()
        assert (told.state, told.reason) == ("lost", f"{name}.model.train is gone")

    def test_a_class_that_was_imported_anew(self, host: Host, engine: Engine) -> None:
        name = host()
        engine["tagging"] = patch_of(name, "Trainer.step")
        apply()
        importlib.reload(importlib.import_module(f"{name}.model"))
        [told] = status()
        assert (told.state, told.reason) == ("lost", f"{name}.model was imported anew; call apply() again")


class TestRegistry:
    def test_the_built_in_patches_are_the_files(self) -> None:
        folder = Path(registry.__file__).parent.parent / "patches"
        files = {path.stem.replace("_", "-") for path in folder.glob("[!_]*.py")}
        assert {patch.name for patch in registry._built_in()} == files

    def test_one_name_to_exclude_may_be_a_string(self, engine: Engine) -> None:
        for name in ("tagging", "other"):
            engine[name] = Patch(name, "")
        assert registry.select([], exclude="other") == [engine["tagging"]]

    def test_unknown_names(self, engine: Engine) -> None:
        engine["tagging"], engine["other"] = Patch("tagging", ""), Patch("other", "")
        with pytest.raises(PatchError) as caught:
            registry.select(["a"], exclude=["b"])
        assert str(caught.value) == "unknown patch 'a', 'b'; known: tagging, other"
