"""Verdicts, and what asking by name, for all, and strictly makes of them."""

from __future__ import annotations

import importlib
import sys

import pytest

from megatron_rl_patches import PatchError, Settings, apply, revert, status
from megatron_rl_patches.engine import installer
from megatron_rl_patches.engine.api import activate_from_environment
from megatron_rl_patches.engine.patch import Patch
from megatron_rl_patches.engine.records import Claim

from .conftest import MODEL, Engine, Framework, Tagged, patch_of, tag


def verdicts() -> dict[str, tuple[str, str]]:
    return {s.target.split(".", 1)[1]: (s.state, s.reason) for s in status()}


def test_an_absent_framework_is_never_an_error(engine: Engine) -> None:
    engine["tagging"] = patch_of("no_such_framework", "train")
    apply("tagging", strict=True)
    assert verdicts() == {"model.train": ("absent", "no_such_framework is not installed")}


def test_states_print_as_a_table(framework: Framework, engine: Engine) -> None:
    name = framework()
    engine["tagging"] = patch_of(name, "train", "save")
    engine["other"] = patch_of(name, "run", name="other")
    engine["nowhere"] = patch_of("no_such_framework", "train", name="nowhere")
    importlib.import_module(f"{name}.model")
    apply()
    header, *rows, idle, fault = str(status()).splitlines()
    assert header.split() == ["patch", name]
    assert [row.split(maxsplit=1) for row in rows] == [
        ["tagging", "2 applied"],
        ["other", "1 missing"],
    ]
    assert idle == "no framework for these is here: nowhere"
    assert "does not define run" in fault
    revert()
    assert {site.state for site in status()} == {"reverted"}
    assert [site.patch for site in status()] == ["tagging", "tagging"]


def test_without_a_selection_the_table_says_so(engine: Engine) -> None:
    assert str(status()) == "no patch is selected"


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
    framework: Framework,
    engine: Engine,
    site: str,
    options: dict,
    state: str,
    reason: str,
    imported_first: bool,
) -> None:
    name = framework()
    engine["tagging"] = patch_of(name, site, **options)
    module = importlib.import_module(f"{name}.model") if imported_first else None
    apply()
    module = module or importlib.import_module(f"{name}.model")
    [(told_state, told_reason)] = verdicts().values()
    assert told_state == state
    assert reason in told_reason
    assert module.train("m") == ("trained", "m", 1)


def test_a_name_that_moved_is_drift_and_says_where_to(tagged: Tagged) -> None:
    name = tagged(
        "train", files={"loop": "def train(model):\n    return 1", "model": "from .loop import train"}
    )
    apply()
    importlib.import_module(f"{name}.model")
    assert verdicts() == {"model.train": ("drifted", f"moved: {name}.model imports it from .loop")}


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
    assert [s.state for s in status()] == ["missing"]


def test_not_needed_is_never_an_error(tagged: Tagged) -> None:
    name = tagged("train", skip_if=lambda facts: "mended upstream")
    apply("tagging", strict=True)
    assert importlib.import_module(f"{name}.model").train("m") == ("trained", "m", 1)
    assert verdicts() == {"model.train": ("not needed", "mended upstream")}


@pytest.mark.parametrize("first", ["model", "other"])
def test_all_sites_of_a_framework_or_none(engine: Engine, tagged: Tagged, first: str) -> None:
    name = tagged("train", "run", files={"other": "def go(model):\n    return 'gone'"})
    engine["tagging"].wrap(f"{name}.other", "go")(tag)
    apply()
    for module in (first, "model", "other"):
        importlib.import_module(f"{name}.{module}")
    states = verdicts()
    assert states["model.run"][0] == "missing"
    for other in ("model.train", "other.go"):
        assert states[other][0] == "missing"
        assert states[other][1].startswith(f"another site cannot take effect: {name}.model.run")
    assert sys.modules[f"{name}.model"].train("m") == ("trained", "m", 1)
    assert sys.modules[f"{name}.other"].go("m") == "gone"


@pytest.mark.parametrize("first", ["model", "other"])
def test_a_live_fault_holds_back_whatever_is_imported_first(
    engine: Engine, tagged: Tagged, first: str
) -> None:
    replaced = MODEL + "\nimport posixpath\nglobals()['train'] = posixpath.join"
    name = tagged("train", files={"model": replaced, "other": "def go(model):\n    return 'gone'"})
    engine["tagging"].wrap(f"{name}.other", "go")(tag)
    apply()
    for module in (first, "model", "other"):
        importlib.import_module(f"{name}.{module}")
    assert {state for state, _ in verdicts().values()} == {"conflict"}
    assert sys.modules[f"{name}.other"].go("m") == "gone"


@pytest.mark.parametrize("calls", [[(), ("tagging",)], [("tagging",), ()]])
def test_by_name_is_a_must_whatever_else_is_asked_for(tagged: Tagged, calls: list[tuple[str, ...]]) -> None:
    replaced = MODEL + "\nimport posixpath\nglobals()['train'] = posixpath.join"
    name = tagged("train", files={"model": replaced})
    for names in calls:
        apply(*names)
    for _ in range(2):
        with pytest.raises(PatchError, match="conflict"):
            importlib.import_module(f"{name}.model")


def test_strict_about_a_half_imported_module_does_not_fail_an_unrelated_import(
    tagged: Tagged, caplog: pytest.LogCaptureFixture
) -> None:
    half = "import megatron_rl_patches\nmegatron_rl_patches.apply(strict=True)\nglobals()['train'] = len\n"
    source = half + "def train(model):\n    return 1\nimport posixpath\nglobals()['train'] = posixpath.join"
    name = tagged("train", files={"model": source, "later": ""})
    importlib.import_module(f"{name}.model")
    importlib.import_module(f"{name}.later")
    assert "conflict" in caplog.text


def test_frameworks_do_not_hold_each_other_back(framework: Framework, engine: Engine) -> None:
    good, bad = framework(), framework(model="")
    engine["tagging"] = patch_of(good, "train")
    engine["tagging"].wrap(f"{bad}.model", "train")(tag)
    apply()
    assert importlib.import_module(f"{good}.model").train("m")[0] == "patched"
    importlib.import_module(f"{bad}.model")
    assert [s.state for s in status()] == ["applied", "missing"]


def test_a_target_that_cannot_be_wrapped_fails_and_nothing_stays(
    framework: Framework, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = "class Meta(type):\n    def __setattr__(cls, name, value): raise TypeError('frozen')\n"
    name = framework(
        model=frozen
        + "class Trainer(metaclass=Meta):\n    def step(self, x): return x\ndef train(m): return m"
    )
    engine["tagging"] = patch_of(name, "train", "Trainer.step")
    apply()
    module = importlib.import_module(f"{name}.model")
    states = verdicts()
    assert states["model.Trainer.step"] == ("failed", "wrapping it raised TypeError: frozen")
    assert states["model.train"][0] == "failed"
    assert module.train("m") == "m"


def test_by_name_is_a_must_and_nothing_is_changed(framework: Framework, engine: Engine) -> None:
    good, bad = framework(), framework(model="")
    engine["tagging"] = patch_of(good, "train")
    engine["tagging"].wrap(f"{bad}.model", "train")(tag)
    module = importlib.import_module(f"{good}.model")
    original = module.train
    with pytest.raises(PatchError, match=f"{bad}.model.train: missing") as caught:
        apply("tagging")
    lines = str(caught.value).splitlines()
    assert [line[:10] for line in lines] == ["cannot tak", "  tagging:", "The code o"]
    assert lines[-1].endswith("or use a release in docs/compatibility.md.")
    assert "(apply(exclude=...), MEGATRON_RL_PATCHES=all,-NAME)" in lines[-1]
    assert isinstance(caught.value, RuntimeError)
    assert not isinstance(caught.value, ImportError)
    assert module.train is original
    assert status() == []


def test_for_all_is_a_may_unless_strict(framework: Framework, engine: Engine) -> None:
    engine["tagging"] = patch_of(framework(), "run")
    apply()
    revert()
    for options in ({"strict": True}, {"settings": Settings(strict=True)}):
        with pytest.raises(PatchError):
            apply(**options)
    apply(strict=False, settings=Settings(strict=True))


def test_strict_raises_at_the_import(tagged: Tagged) -> None:
    name = tagged("run")
    activate_from_environment({"MEGATRON_RL_PATCHES": "1", "MEGATRON_RL_PATCHES_STRICT": "1"})
    with pytest.raises(PatchError, match="missing"):
        importlib.import_module(f"{name}.model")
    assert f"{name}.model" not in sys.modules
    revert()
    importlib.import_module(f"{name}.model")
