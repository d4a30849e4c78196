"""``make gpu``: other steps run after one that fails, and a dry run succeeds on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import gpu
from benchmarks.gpu import Step

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_other_steps_run_after_one_that_fails_and_one_that_hangs(tmp_path: Path) -> None:
    steps = [
        Step("bad", "Bad", "tests.unit.gpu_steps:fail", 100),
        Step("slow", "Slow", "tests.unit.gpu_steps:hang", 20),
        Step("good", "Good", "tests.unit.gpu_steps:succeed", 100),
    ]
    assert gpu.run(steps, dry=False, folder=tmp_path) == 1
    outcomes = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    assert [outcome["status"] for outcome in outcomes.values()] == ["failed", "not done in 20 s", "ok"]
    assert outcomes["bad"]["error"].endswith("ValueError: no such kernel\n")
    assert "KeyboardInterrupt" in outcomes["slow"]["error"]
    assert not _is_running(int(outcomes["slow"]["error"].splitlines()[0]))
    assert outcomes["good"]["result"]["figures"] == {"answer": 42}
    page = (tmp_path / "gpu.md").read_text()
    assert "ValueError: no such kernel" in page
    assert "- answer: 42" in page


def _is_running(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_there_must_be_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as exit:
        gpu.main([])
    assert exit.value.code == 2
    assert "torch sees no GPU" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(700)  # A busy machine takes much longer than the two minutes of an idle one.
def test_a_dry_run_succeeds_in_every_step(tmp_path: Path) -> None:
    """The environment has the packages of this one, so that none has to be brought along."""
    variables = [
        "DRY=1",
        f"PYTHON={sys.executable}",
        f"GPU_VENV={tmp_path / 'venv'}",
        f"GPU_WHEELS={tmp_path / 'wheels'}",
        f"GPU_ARGS=--folder {tmp_path}",
    ]
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MAKEFLAGS")}
    done = subprocess.run(
        ["make", "gpu", *variables], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=680
    )
    report = json.loads((tmp_path / "gpu.json").read_text())
    failed = {name: outcome for name, outcome in report["steps"].items() if outcome["status"] != "ok"}
    assert not failed, failed
    assert list(report["steps"]) == [step.name for step in gpu.STEPS]
    assert report["gpu"] is None
    assert done.returncode == 0, done.stderr
    assert "these are no measurements" in (tmp_path / "gpu.md").read_text()
