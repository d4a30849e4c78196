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
    WITHOUT[0],
    Result(f"{DDP}reduces", 2, "", "failed", "", "AssertionError: reduced twice"),
    *WITHOUT[4:],
]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout, whose tests have the results above. Changes show again with ``lean-loss`` alone."""

    def run(*_: object, ranks: object = 1, patches: str = "", results: Path, **options: object) -> None:
        with open(results, "a") as lines:
            for result in PATCHED if patches else WITHOUT:
                lines.write(replace(result, patches=patches).to_json() + "\n")

    def repeated(checkout: Path, changed: list[Change], patches: str, hang_after: float) -> list[Change]:
        return changed if patches == "lean-loss" else []

    monkeypatch.setattr(runs, "run_at_smallest", run)
    monkeypatch.setattr(runs, "run_with_patches", lambda _, patches, **more: run(patches=patches, **more))
    monkeypatch.setattr(runs, "repeated_changes", repeated)
    monkeypatch.setattr("signal.signal", lambda *args: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Megatron-LM" / "tests" / "unit_tests").mkdir(parents=True)
    return tmp_path / "Megatron-LM"


def test_changed_outcomes(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = Path("facts.json")
    assert main([str(checkout), "--patches=all", "--patches=lean-loss", f"--json={file}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["5 tests, 2 passed, 1 skipped", "1 cannot run here: TransformerEngine"]
    outcomes = "passed without, failed with lean-loss: AssertionError: reduced twice"
    assert f"CHANGED BY PATCHES at 2 ranks: {DDP}reduces: {outcomes}" in lines
    assert f"differed once with all, and not again: {DDP}reduces" in lines
    facts = json.loads(file.read_text())
    assert (facts["tests"], facts["passed"], facts["skipped"]) == (5, 2, 1)
    assert facts["not_runnable"] == {"TransformerEngine": 1}
    assert [one["nodeid"] for one in facts["failed"]] == [f"{DDP}streams"]
    (change,) = facts["changed_by_patches"]
    assert change["with"]["patches"] == "lean-loss"
    assert [change["with"]["patches"] for change in facts["differed_once"]] == ["all"]
    assert (facts["commit"], facts["patches"]) == (None, ["all", "lean-loss"])


def test_without_a_comparison(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(checkout), "--patches", ""]) == 0
    assert "CHANGED" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--patches=no-such-patch", "no-such-patch"),
        ("--ranks=1,two", "--ranks"),
        ("--ranks=0", "a number below 1"),
        ("--select=tests/none", "has no tests/none"),
    ],
)
def test_refusals(checkout: Path, argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(checkout), argument])
    assert message in capsys.readouterr().err


def test_the_pages_show_the_records() -> None:
    for page, text in report.pages().items():
        assert page.read_text("utf-8") == text, "run: python -m tests.lab.conformance.report"
