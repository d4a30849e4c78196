"""The commands, on small frameworks: what they print for people, pipes and programs, and their exit codes."""

from __future__ import annotations

import os
import sys
import types
import zipfile
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from megatron_rl_patches import __version__
from megatron_rl_patches.cli.screens import check_writable
from megatron_rl_patches.engine import registry
from megatron_rl_patches.engine.patch import Patch
from tests.worlds.command_line import invoke, invoke_json, refuse
from tests.worlds.files import write

TARGET = "mrp_framework.model.train"
DRIFTED = "def train(chunks): ..."


@pytest.fixture(autouse=True)
def _one_patch(monkeypatch: MonkeyPatch) -> None:
    """A registry with one patch, no variables, and the output of a pipe."""
    patch = Patch("test-patch", "it can be called again", upstream=("owner/project#1",))
    patch.wrap("mrp_framework.model", "train", parameters=("model",))(lambda call: None)
    monkeypatch.setattr(registry, "patches", lambda: {patch.name: patch})
    for name in [name for name in os.environ if name.startswith("MEGATRON_RL_PATCHES")]:
        monkeypatch.delenv(name)


def framework(folder: Path, text: str = "def train(model): ...") -> Path:
    return write(folder, {"mrp_framework/__init__.py": "", "mrp_framework/model.py": text})


def test_doctor_names_a_fault_of_what_is_selected(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    assert "no problems" in invoke("doctor").stdout
    diagnosis = invoke_json("doctor")
    assert diagnosis["python"] == sys.version.split()[0]
    assert diagnosis["frameworks"] == [{"name": "mrp_framework", "path": None, "version": None}]
    assert len(diagnosis["out_of_reach"]) == 4
    monkeypatch.syspath_prepend(framework(tmp_path, DRIFTED))
    invoke("doctor")
    monkeypatch.setenv("MEGATRON_RL_PATCHES", "1")
    message = f"test-patch: {TARGET}: drifted: it no longer takes model"
    remedy = "export MEGATRON_RL_PATCHES=0"
    shown = invoke("doctor", code=1).stdout
    assert f"- {message}\n  {remedy}\n" in shown
    assert shown.count("it no longer takes model") == 1
    assert {"message": message, "remedy": remedy} in invoke_json("doctor", code=1)["problems"]


def test_check_this_environment(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    assert invoke("check").stdout.splitlines() == ["test-patch: it can be called again"]
    monkeypatch.syspath_prepend(framework(tmp_path, f"raise AssertionError('imported')\n{DRIFTED}"))
    summary, *_, fault, _ = invoke("check", code=1).stdout.splitlines()
    assert summary == "test-patch: it can be called again"
    assert fault == f"test-patch: {TARGET} is drifted in this environment: it no longer takes model"
    (status,) = invoke_json("check", code=1)
    assert (status["source"], status["state"]) == ("this environment", "drifted")


def test_a_patch_that_nobody_names_is_no_fault(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    explicit = Patch("extra", "it trains otherwise", upstream=("owner/project#2",), explicit=True)
    explicit.wrap("mrp_framework.model", "gone")(lambda call: None)
    monkeypatch.setattr(registry, "patches", lambda: {"extra": explicit})
    assert "mrp_framework.model does not define gone" in invoke("check", framework(tmp_path)).stdout
    assert "extra (only where it is named): " in invoke("check").stdout
    monkeypatch.setenv("MEGATRON_RL_PATCHES", "extra")
    invoke("check", tmp_path, code=1)


def test_tables_for_people_and_for_a_page(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    places = framework(tmp_path / "one"), framework(tmp_path / "two", DRIFTED)
    sources = [f"framework {number}={place}" for number, place in enumerate(places, 1)]
    assert invoke("check", *sources, code=1).stdout.splitlines() == [
        "mrp_framework",
        "patch       site                       framework 1  framework 2",
        f"test-patch  {TARGET}  fits         drifted",
        f"test-patch: {TARGET} is drifted in framework 2: it no longer takes model",
        "",
    ]
    page = tmp_path / "page.md"
    invoke("check", *sources, "--markdown", page, code=1)
    text = page.read_text()
    assert str(tmp_path) not in text and text.startswith("# Compatibility\n")
    assert text.endswith(
        f"""\
## mrp_framework

All: framework 1, framework 2.

| patch | site | verdict | in |
| --- | --- | --- | --- |
| test-patch | `{TARGET}` | fits | framework 1 |
| test-patch | `{TARGET}` | **drifted**: it no longer takes model | framework 2 |
"""
    )
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[32mfits" in invoke("check", places[0]).stdout


def test_check_as_json(tmp_path: Path) -> None:
    """Of code that the parser warns of, too."""
    (status,) = invoke_json("check", framework(tmp_path / "one", "DOT = '\\.'\ndef train(model): ..."))
    assert status.pop("fingerprint")
    assert status == {
        "detail": "",
        "because_of": "",
        "source": "one",
        "patch": "test-patch",
        "framework": "mrp_framework",
        "target": TARGET,
        "state": "fits",
        "reason": "has the bug that the patch fixes",
    }


def test_sources_that_cannot_be_judged(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    one, other = framework(tmp_path / "a" / "same"), framework(tmp_path / "b" / "same")
    result = invoke("check", one, tmp_path / "empty")
    assert "no framework that a patch knows is in empty" in result.stderr
    assert "empty" not in result.stdout
    assert "no framework that a patch knows" in refuse("check", tmp_path / "empty")
    assert "called 'same'; name them: NAME=SOURCE" in refuse("check", one, other)
    wheel, text = tmp_path / "framework-1.0-py3-none-any.whl", b"def train(model): ..."
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("mrp_framework/__init__.py", "")
        archive.writestr("mrp_framework/model.py", text)
    wheel.write_bytes(wheel.read_bytes().replace(text, text.upper()))
    assert f"{wheel}: Bad CRC-32 for file 'mrp_framework/model.py'" in refuse("check", wheel)


def test_configured_sites(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.undo()  # the real registry: reentrant-train turns the variable into sites
    monkeypatch.setenv("MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS", "mrp_framework.model:train")
    statuses = invoke_json("check", framework(tmp_path))
    assert [f["state"] for f in statuses if f["target"] == TARGET] == ["fits"]


def test_demo_is_handed_its_options(monkeypatch: MonkeyPatch) -> None:
    given: dict[str, object] = {}
    module = types.ModuleType("megatron_rl_patches.demo")
    module.run_demo = lambda **options: given.update(options) or 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for options, ranks in (((), 2), (("--without-patches",), 1), (("--without-patches", "--ranks", 3), 3)):
        invoke("demo", "--rollouts", 2, *options, code=3)
        assert given == {"rollouts": 2, "ranks": ranks, "seed": 0, "without_patches": bool(options)}


@pytest.mark.parametrize(("command", "option"), [("check", "--markdown"), ("estimate", "--plot")])
def test_output_that_cannot_be_written_is_refused_at_once(command: str, option: str, tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    source = [framework(tmp_path / "framework")] if command == "check" else []
    for file, reason in (("folder.png", "Is a directory"), ("none/file.png", "No such file or directory")):
        message = refuse(command, *source, option, tmp_path / file)
        assert len(message.splitlines()) == 1
        assert f": {option} is {tmp_path / file}, which cannot be written: {reason}" in message


def test_a_check_of_the_output_leaves_it_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("before")
    for name in ("old", "new"):
        check_writable("--json", tmp_path / name)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"old": "before"}


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = refuse("estimate", "--plot", tmp_path / "memory.png")
    assert "--plot needs matplotlib: pip install 'megatron-rl-patches[plot]'" in message


def test_version_and_help() -> None:
    assert invoke("--version").stdout == f"megatron-rl-patches {__version__}\n"
    assert all("Exit code" in invoke(command, "--help").stdout for command in ("doctor", "check"))
