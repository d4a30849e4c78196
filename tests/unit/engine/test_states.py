"""Verdicts, and what asking by name, for all, and strictly makes of them."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from megatron_rl_patches import PatchError, Settings, apply, revert, status
from megatron_rl_patches.engine import installer
from megatron_rl_patches.engine.api import activate_from_environment
from megatron_rl_patches.engine.patch import Patch
from megatron_rl_patches.engine.records import Claim

from .conftest import PLAIN, REPLACED, Engine, Framework, patch_of, states, tag, verdicts


def test_an_absent_framework_is_never_an_error(engine: Engine) -> None:
    engine["tagging"] = patch_of("no_such_framework", "train")
    apply("tagging", strict=True)
    assert verdicts() == {"model.train": ("absent", "no_such_framework is not installed")}


def test_states_print_as_a_table(framework: Framework, engine: Engine) -> None:
    assert str(status()) == "no patch is selected"
    package = framework()
    engine["tagging"] = patch_of(package, "train", "save")
    engine["other"] = patch_of(package, "run", name="other")
    engine["nowhere"] = patch_of("no_such_framework", "train", name="nowhere")
    assert package.model
    apply()
    header, *rows, idle, fault = str(status()).splitlines()
    assert header.split() == ["patch", package.name]
    assert [row.split(maxsplit=1) for row in rows] == [["tagging", "2 applied"], ["other", "1 missing"]]
    assert idle == "no framework for these is here: nowhere"
    assert "does not define run" in fault
    revert()
    assert [(site.patch, site.state) for site in status()] == [("tagging", "reverted")] * 2


@pytest.mark.parametrize(
    ("site", "options", "state", "reason"),
    [
        ("run", {}, "missing", "does not define run"),
        ("Trainer.run", {}, "missing", "does not define Trainer.run"),
        ("train", {"parameters": ("model", "optimizer")}, "drifted", "it no longer takes optimizer"),
        ("train", {"skip_if": lambda facts: 1 / 0}, "failed", "judging it raised ZeroDivisionError"),
    ],
)
@pytest.mark.parametrize("imported_first", [True, False])
def test_a_site_that_does_not_fit_is_left_alone_with_its_reason(
    tagged: Framework, site: str, options: Any, state: str, reason: str, imported_first: bool
) -> None:
    package = tagged(site, **options)
    assert not imported_first or package.model
    apply()
    assert package.model.train("m") == PLAIN
    [(found, because)] = verdicts().values()
    assert found == state and reason in because


def test_a_name_that_moved_is_drift_and_says_where_to(tagged: Framework) -> None:
    package = tagged("train", files={"loop": "def train(model): ...", "model": "from .loop import train"})
    apply()
    assert package.model
    assert verdicts() == {"model.train": ("drifted", f"moved: {package}.model imports it from .loop")}


def test_a_missing_module_of_a_present_framework_shows_before_anything_is_imported(
    framework: Framework, engine: Engine
) -> None:
    patch = engine["tagging"] = Patch("tagging", "")
    patch.wrap(f"{framework()}.gone", "train")(tag)
    for must in (
        lambda: apply("tagging"),
        lambda: installer.installer.add([patch], Settings(), Claim(True, lasts=True)),
    ):
        with pytest.raises(PatchError, match=r"no source of module \w+\.gone is found"):
            must()
        assert status() == []
    apply()
    assert states() == {"gone.train": "missing"}


def test_not_needed_is_never_an_error(tagged: Framework) -> None:
    package = tagged("train", skip_if=lambda facts: "mended upstream")
    apply("tagging", strict=True)
    assert package.model.train("m") == PLAIN
    assert verdicts() == {"model.train": ("not needed", "mended upstream")}


@pytest.mark.parametrize("first", ["model", "other"])
@pytest.mark.parametrize(("model", "state"), [(None, "missing"), (REPLACED, "conflict")])
def test_all_sites_of_a_framework_or_none(
    engine: Engine, tagged: Framework, first: str, model: str | None, state: str
) -> None:
    """Whatever is imported first, and whether the source shows the fault or the live module."""
    files = {"other": "def go(model):\n    return 'gone'", **({"model": model} if model else {})}
    package = tagged("train", *([] if model else ["run"]), files=files)
    engine["tagging"].wrap(f"{package}.other", "go")(tag)
    apply()
    for module in (first, "model", "other"):
        importlib.import_module(f"{package}.{module}")
    assert set(states().values()) == {state}
    assert package.other.go("m") == "gone"
    if not model:
        assert package.model.train("m") == PLAIN
        for target in ("model.train", "other.go"):
            reason = verdicts()[target][1]
            assert reason.startswith(f"another site cannot take effect: {package}.model.run")


@pytest.mark.parametrize("calls", [[(), ("tagging",)], [("tagging",), ()]])
def test_by_name_is_a_must_whatever_else_is_asked_for(
    tagged: Framework, calls: list[tuple[str, ...]]
) -> None:
    package = tagged("train", files={"model": REPLACED})
    for names in calls:
        apply(*names)
    for _ in range(2):
        with pytest.raises(PatchError, match="conflict"):
            package.model  # noqa: B018


def test_strict_about_a_half_imported_module_does_not_fail_an_unrelated_import(
    tagged: Framework, caplog: pytest.LogCaptureFixture
) -> None:
    half = "import megatron_rl_patches\nmegatron_rl_patches.apply(strict=True)\nglobals()['train'] = len\n"
    package = tagged("train", files={"model": half + REPLACED, "later": ""})
    assert package.model and package.later
    assert "conflict" in caplog.text


def test_a_target_that_cannot_be_wrapped_fails_and_nothing_stays(tagged: Framework) -> None:
    frozen = (
        "class Meta(type):\n    def __setattr__(cls, name, value): raise TypeError('frozen')\n"
        "class Trainer(metaclass=Meta):\n    def step(self, x): return x\n"
        "def train(m): return m"
    )
    package = tagged("train", "Trainer.step", files={"model": frozen})
    apply()
    assert package.model.train("m") == "m"
    assert verdicts()["model.Trainer.step"] == ("failed", "wrapping it raised TypeError: frozen")
    assert states()["model.train"] == "failed"


def test_frameworks_do_not_hold_each_other_back_but_by_name_all_are_a_must(
    framework: Framework, engine: Engine
) -> None:
    good, bad = framework(), framework(model="")
    engine["tagging"] = patch_of(good, "train")
    engine["tagging"].wrap(f"{bad}.model", "train")(tag)
    original = good.model.train
    with pytest.raises(PatchError, match=f"{bad}.model.train: missing") as caught:
        apply("tagging")
    lines = str(caught.value).splitlines()
    assert [line[:10] for line in lines] == ["cannot tak", "  tagging:", "The code o"]
    assert lines[-1].endswith("or use a release in docs/compatibility.md.")
    assert "(apply(exclude=...), MEGATRON_RL_PATCHES=all,-NAME)" in lines[-1]
    assert isinstance(caught.value, RuntimeError) and not isinstance(caught.value, ImportError)
    assert good.model.train is original
    assert status() == []
    apply()
    assert good.model.train("m")[0] == "patched" and bad.model
    assert [site.state for site in status()] == ["applied", "missing"]


def test_for_all_is_a_may_unless_strict(tagged: Framework) -> None:
    package = tagged("run")
    apply()
    revert()
    for options in ({"strict": True}, {"settings": Settings(strict=True)}):
        with pytest.raises(PatchError):
            apply(**options)
    apply(strict=False, settings=Settings(strict=True))
    revert()
    activate_from_environment({"MEGATRON_RL_PATCHES": "1", "MEGATRON_RL_PATCHES_STRICT": "1"})
    with pytest.raises(PatchError, match="missing"):
        package.model  # noqa: B018
    assert f"{package}.model" not in sys.modules
    revert()
    assert package.model
