"""The command ``conformance``: what it prints and writes of results, which here come from no tests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from megatron_rl_patches.cli import main
from megatron_rl_patches.cli.commands import app
from megatron_rl_patches.testing import conformance
from megatron_rl_patches.testing.conformance import Change, Result

DDP = "tests/unit_tests/distributed/test_ddp.py::test_"
WITHOUT = [
    Result(f"{DDP}buckets", 1, "", "passed"),
    Result(f"{DDP}reduces", 1, "", "not_runnable", "more ranks", "world_size (1) is not divisible by 2"),
    Result(f"{DDP}reduces", 2, "", "passed"),
    Result(f"{DDP}fp8", 1, "", "not_runnable", "TransformerEngine", "No module named 'transformer_engine'"),
    Result(f"{DDP}streams", 1, "", "failed", "", "AssertionError: on a CPU\nat test_ddp.py:7"),
    Result("tests/unit_tests/test_basic.py::test_skips", 1, "", "skipped", "", "of no use"),
]
PATCHED = [
    Result(f"{DDP}buckets", 1, "all", "passed"),
    Result(f"{DDP}reduces", 2, "all", "failed", "", "AssertionError: reduced twice"),
    Result(f"{DDP}streams", 1, "all", "failed", "", "AssertionError: on a CPU"),
    Result("tests/unit_tests/test_basic.py::test_skips", 1, "all", "skipped"),
]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout, whose tests have the results above."""

    def append(file: Path, results: list[Result]) -> None:
        with open(file, "a") as lines:
            lines.writelines(result.to_json() + "\n" for result in results)

    def without(*args: object, results: Path, **kwargs: object) -> None:
        append(results, WITHOUT)

    def with_patches(checkout: Path, patches: str, results: Path, **kwargs: object) -> None:
        append(results, [replace(result, patches=patches) for result in PATCHED])

    monkeypatch.setattr(conformance, "run_at_smallest", without)
    monkeypatch.setattr(conformance, "run_with_patches", with_patches)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "Megatron-LM"
    (folder / "tests" / "unit_tests").mkdir(parents=True)
    return folder


def _invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["conformance", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout


def test_a_changed_verdict(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        conformance, "repeated_changes", lambda checkout, changed, patches, hang_after: changed
    )
    code, output = _invoke(checkout, "--json", tmp_path / "facts.json")
    assert code == 1
    assert f"CHANGED BY PATCHES at 2 ranks: {DDP}reduces: passed without, failed with all" in output
    rows = [line.split() for line in output.splitlines()]
    assert ["distributed", "4", "2", "0", "1", "1", "0", "1"] in rows
    assert ["TransformerEngine", "1"] in rows
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert (facts["tests"], facts["passed"], facts["skipped"]) == (5, 2, 1)
    assert facts["not_runnable"] == {"TransformerEngine": 1}
    assert facts["named"] == {"tensor on a GPU": [], "other package": []}
    assert [one["nodeid"] for one in facts["failed"]] == [f"{DDP}streams"]
    (change,) = facts["changed_by_patches"]
    assert change["with"]["message"] == "AssertionError: reduced twice"
    assert (facts["commit"], facts["patches"]) == (None, ["all"])


def test_several_sets_of_patches(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def repeated(checkout: Path, changed: list[Change], patches: str, hang_after: float) -> list[Change]:
        return changed if patches == "lean-loss" else []

    monkeypatch.setattr(conformance, "repeated_changes", repeated)
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no git
    sets = ("--patches", "all", "--patches", "lean-loss")
    code, output = _invoke(checkout, *sets, "--json", tmp_path / "facts.json")
    assert code == 1
    assert f"differed once with all, and not again: {DDP}reduces" in output
    assert "failed with all" not in output
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert (facts["commit"], facts["patches"]) == (None, ["all", "lean-loss"])
    assert [change["with"]["patches"] for change in facts["changed_by_patches"]] == ["lean-loss"]
    assert [change["with"]["patches"] for change in facts["differed_once"]] == ["all"]


def test_a_failure_is_no_changed_verdict(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance, "changes", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(SystemExit) as exit:
        main(["conformance", str(checkout)])
    assert exit.value.code == 2
    assert "No space left on device" in capsys.readouterr().err


def test_without_a_comparison(checkout: Path) -> None:
    code, output = _invoke(checkout, "--patches", "")
    assert code == 0
    assert "1" not in output.splitlines()[1].split()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--patches", "no-such-patch"], "no-such-patch"),
        (["--ranks", "1,two"], "pass numbers of ranks"),
        (["--ranks", "0"], "pass numbers of ranks"),
        (["--select", "tests/none"], "has no tests/none"),
    ],
)
def test_refusals(checkout: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["conformance", str(checkout), *arguments])
    assert result.exit_code != 0
    assert message in str(result.exception)
