"""The commands, on small frameworks: what they print for people, pipes and programs, and their exit codes."""

from __future__ import annotations

import json
import os
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from megatron_rl_patches import __version__
from megatron_rl_patches.cli import main
from megatron_rl_patches.cli.commands import app
from megatron_rl_patches.cli.screens import check_writable
from megatron_rl_patches.engine import registry
from megatron_rl_patches.engine.patch import Patch

TARGET = "mrp_framework.model.train"


@pytest.fixture(autouse=True)
def _one_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry with one patch, no variables, and the output of a pipe."""
    patch = Patch("test-patch", "it can be called again", upstream=("owner/project#1",))
    patch.wrap("mrp_framework.model", "train", parameters=("model",))(lambda call: None)
    monkeypatch.setattr(registry, "patches", lambda: {patch.name: patch})
    for name in [name for name in os.environ if name.startswith("MEGATRON_RL_PATCHES")]:
        monkeypatch.delenv(name)


def framework(folder: Path, text: str = "def train(model): ...") -> Path:
    (folder / "mrp_framework").mkdir(parents=True)
    (folder / "mrp_framework" / "__init__.py").touch()
    (folder / "mrp_framework" / "model.py").write_text(text)
    return folder


def invoke(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def invoke_json(*arguments: object, code: int = 0) -> Any:
    return json.loads(invoke(*arguments, "--json", code=code).stdout)


def refuse(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What an error of ours says; its exit code is 2."""
    with pytest.raises(SystemExit) as exit:
        main(list(map(str, arguments)))
    assert exit.value.code == 2
    return capsys.readouterr().err


class TestDoctor:
    def test_nothing_selected_is_no_problem(self) -> None:
        assert "no problems" in invoke("doctor").stdout
        diagnosis = invoke_json("doctor")
        assert diagnosis["python"] == sys.version.split()[0]
        assert diagnosis["frameworks"] == [{"name": "mrp_framework", "path": None, "version": None}]
        assert len(diagnosis["out_of_reach"]) == 4

    def test_a_fault_of_what_is_selected(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(framework(tmp_path, "def train(chunks): ..."))
        invoke("doctor")
        monkeypatch.setenv("MEGATRON_RL_PATCHES", "1")
        message = f"test-patch: {TARGET}: drifted: it no longer takes model"
        remedy = "export MEGATRON_RL_PATCHES=0"
        shown = invoke("doctor", code=1).stdout
        assert f"- {message}\n  {remedy}\n" in shown
        assert shown.count("it no longer takes model") == 1
        assert {"message": message, "remedy": remedy} in invoke_json("doctor", code=1)["problems"]


class TestCheck:
    def test_this_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert invoke("check").stdout.splitlines() == ["test-patch: it can be called again"]
        monkeypatch.syspath_prepend(
            framework(tmp_path, "raise AssertionError('imported')\ndef train(chunks): ...")
        )
        assert invoke("check", code=1).stdout.splitlines() == [
            "test-patch: it can be called again",
            "mrp_framework",
            "patch       site                       this environment",
            f"test-patch  {TARGET}  drifted",
            f"test-patch: {TARGET} is drifted in this environment: it no longer takes model",
            "",
        ]
        (status,) = invoke_json("check", code=1)
        assert (status["source"], status["state"]) == ("this environment", "drifted")

    def test_a_patch_that_nobody_names_is_shown_and_no_fault(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        explicit = Patch("extra", "it trains otherwise", upstream=("owner/project#2",), explicit=True)
        explicit.wrap("mrp_framework.model", "gone")(lambda call: None)
        monkeypatch.setattr(registry, "patches", lambda: {"extra": explicit})
        assert "mrp_framework.model does not define gone" in invoke("check", framework(tmp_path)).stdout
        monkeypatch.setenv("MEGATRON_RL_PATCHES", "extra")
        invoke("check", tmp_path, code=1)

    def test_colored_on_a_terminal(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert "\x1b[32mfits" in invoke("check", framework(tmp_path)).stdout

    def test_table(self, tmp_path: Path) -> None:
        framework(tmp_path / "one")
        framework(tmp_path / "two", "def train(chunks): ...")
        result = invoke("check", f"framework 1={tmp_path / 'one'}", f"framework 2={tmp_path / 'two'}", code=1)
        assert result.stdout.splitlines() == [
            "mrp_framework",
            "patch       site                       framework 1  framework 2",
            f"test-patch  {TARGET}  fits         drifted",
            f"test-patch: {TARGET} is drifted in framework 2: it no longer takes model",
            "",
        ]

    def test_json(self, tmp_path: Path) -> None:
        (status,) = invoke_json("check", framework(tmp_path / "one"))
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

    def test_markdown(self, tmp_path: Path) -> None:
        framework(tmp_path / "one")
        framework(tmp_path / "two", "")
        page = tmp_path / "page.md"
        sources = (f"framework 1={tmp_path / 'one'}", f"framework 2={tmp_path / 'two'}")
        invoke("check", *sources, "--markdown", page, code=1)
        text = page.read_text()
        assert str(tmp_path) not in text
        assert text.startswith("# Compatibility\n")
        assert text.endswith(
            f"""\
## mrp_framework

All: framework 1, framework 2.

| patch | site | verdict | in |
| --- | --- | --- | --- |
| test-patch | `{TARGET}` | fits | framework 1 |
| test-patch | `{TARGET}` | **missing**: mrp_framework.model does not define train | framework 2 |
"""
        )

    def test_a_source_without_frameworks_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        result = invoke("check", framework(tmp_path / "one"), tmp_path / "empty")
        assert "no framework that a patch knows is in empty" in result.stderr
        assert "empty" not in result.stdout

    def test_nothing_to_judge(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "no framework that a patch knows" in refuse(capsys, "check", tmp_path)

    def test_two_sources_of_one_name(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        sources = (framework(tmp_path / "a" / "same"), framework(tmp_path / "b" / "same"))
        assert "called 'same'; name them: NAME=SOURCE" in refuse(capsys, "check", *sources)

    def test_a_corrupt_wheel(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        wheel, text = tmp_path / "framework-1.0-py3-none-any.whl", b"def train(model): ..."
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("mrp_framework/__init__.py", "")
            archive.writestr("mrp_framework/model.py", text)
        wheel.write_bytes(wheel.read_bytes().replace(text, text.upper()))
        message = refuse(capsys, "check", wheel)
        assert f"{wheel}: Bad CRC-32 for file 'mrp_framework/model.py'" in message

    def test_code_that_the_parser_warns_of(self, tmp_path: Path) -> None:
        (status,) = invoke_json("check", framework(tmp_path, "DOT = '\\.'\ndef train(model): ..."))
        assert status["state"] == "fits"

    @pytest.mark.parametrize("is_bare_folder", [False, True])
    def test_configured_functions_are_judged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_bare_folder: bool
    ) -> None:
        monkeypatch.undo()  # the real registry: reentrant-train turns the variable into sites
        monkeypatch.setenv("MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS", "mrp_framework.model:train")
        source = framework(tmp_path)
        if is_bare_folder:
            (source / "mrp_framework" / "__init__.py").unlink()
        statuses = invoke_json("check", source)
        assert [f["state"] for f in statuses if f["target"] == TARGET] == ["fits"]


def test_demo_is_handed_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    module = types.ModuleType("megatron_rl_patches.demo")
    module.run_demo = lambda **options: given.update(options) or 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for options, ranks in (((), 2), (("--without-patches",), 1), (("--without-patches", "--ranks", 3), 3)):
        invoke("demo", "--rollouts", 2, *options, code=3)
        assert given == {"rollouts": 2, "ranks": ranks, "seed": 0, "without_patches": bool(options)}


@pytest.mark.parametrize(
    ("command", "option"),
    [("check", "--markdown"), ("estimate", "--plot")],
)
def test_output_that_cannot_be_written_is_refused_at_once(
    command: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.png").mkdir()
    source = [framework(tmp_path / "framework")] if command == "check" else []
    for file, reason in (("folder.png", "Is a directory"), ("none/file.png", "No such file or directory")):
        message = refuse(capsys, command, *source, option, tmp_path / file)
        assert message.splitlines() == [
            f"megatron-rl-patches: {option} is {tmp_path / file}, which cannot be written: {reason}"
        ]


def test_a_check_of_the_output_leaves_it_as_it_is(tmp_path: Path) -> None:
    for file, before in ((tmp_path / "old", "before"), (tmp_path / "new", None)):
        if before:
            file.write_text(before)
        check_writable("--json", file)
        assert (file.read_text() if file.exists() else None) == before


def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = refuse(capsys, "estimate", "--plot", tmp_path / "memory.png")
    assert "--plot needs matplotlib: pip install 'megatron-rl-patches[plot]'" in message


def test_version() -> None:
    assert invoke("--version").stdout == f"megatron-rl-patches {__version__}\n"


@pytest.mark.parametrize("command", ["doctor", "check"])
def test_help_tells_exit_codes(command: str) -> None:
    assert "Exit code" in invoke(command, "--help").stdout
