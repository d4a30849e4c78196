"""The command: what it prints and writes of results, which here come from no tests; and the records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab.conformance import report, runs
from tests.lab.conformance.__main__ import main
from tests.lab.conformance.runs import Change, Result

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
    """An empty checkout, whose tests have the results above. Changes show again with ``lean-loss`` alone."""

    def append(file: Path, results: list[Result]) -> None:
        with open(file, "a") as lines:
            lines.writelines(result.to_json() + "\n" for result in results)

    def without(*args: object, results: Path, **kwargs: object) -> None:
        append(results, WITHOUT)

    def with_patches(checkout: Path, patches: str, results: Path, **kwargs: object) -> None:
        append(results, [replace(result, patches=patches) for result in PATCHED])

    def repeated(checkout: Path, changed: list[Change], patches: str, hang_after: float) -> list[Change]:
        return changed if patches == "lean-loss" else []

    monkeypatch.setattr(runs, "run_at_smallest", without)
    monkeypatch.setattr(runs, "run_with_patches", with_patches)
    monkeypatch.setattr(runs, "repeated_changes", repeated)
    monkeypatch.setattr("signal.signal", lambda *args: None)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "Megatron-LM"
    (folder / "tests" / "unit_tests").mkdir(parents=True)
    return folder


def test_changed_outcomes(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no git
    file = tmp_path / "facts.json"
    code = main([str(checkout), "--patches", "all", "--patches", "lean-loss", "--json", str(file)])
    output = capsys.readouterr().out
    assert code == 1
    assert f"CHANGED BY PATCHES at 2 ranks: {DDP}reduces: passed without, failed with lean-loss" in output
    assert f"differed once with all, and not again: {DDP}reduces" in output
    assert "failed with all" not in output
    assert "| distributed | 4 | 2 | 0 | 1 | 1 | 0 |" in output
    assert "| TransformerEngine | 1 |" in output
    facts = json.loads(file.read_text())
    assert (facts["tests"], facts["passed"], facts["skipped"]) == (5, 2, 1)
    assert facts["not_runnable"] == {"TransformerEngine": 1}
    assert facts["named"] == {"tensor on a GPU": [], "other package": []}
    assert [one["nodeid"] for one in facts["failed"]] == [f"{DDP}streams"]
    (change,) = facts["changed_by_patches"]
    assert change["with"]["patches"] == "lean-loss"
    assert change["with"]["message"] == "AssertionError: reduced twice"
    assert [change["with"]["patches"] for change in facts["differed_once"]] == ["all"]
    assert (facts["commit"], facts["patches"]) == (None, ["all", "lean-loss"])


def test_without_a_comparison(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(checkout), "--patches", ""]) == 0
    assert "CHANGED" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--patches", "no-such-patch"], "no-such-patch"),
        (["--ranks", "1,two"], "--ranks"),
        (["--ranks", "0"], "a number below 1"),
        (["--select", "tests/none"], "has no tests/none"),
    ],
)
def test_refusals(
    checkout: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(checkout), *arguments])
    assert message in capsys.readouterr().err


def test_the_pages_show_the_records() -> None:
    for page, text in report.pages().items():
        assert page.read_text("utf-8") == text, "run: python -m tests.lab.conformance.report"
