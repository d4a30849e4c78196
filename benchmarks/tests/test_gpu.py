"""``make gpu``: other steps run after one that fails, and a dry run succeeds on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import gpu
from benchmarks.gpu import Step
from benchmarks.gpu_steps import StepResult
from benchmarks.measure import Call
from benchmarks.page import Outcome

ROOT = Path(__file__).parents[2]


def test_a_file_that_is_being_written_when_its_process_dies_is_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Outcome(tmp_path / "gpu.json", "head")
    outcome.begin(status="not ended")
    outcome.save(StepResult(figures={"answer": 42}))

    def write_half(path: Path, text: str) -> None:
        path.write_bytes(text[: len(text) // 2].encode())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(KeyboardInterrupt):
        outcome.save(StepResult(figures={"answer": 43}))
    assert outcome.of_all_steps()["head"]["result"]["figures"] == {"answer": 42}


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Steps end at once: with what is put in here by their names, or else well, with a result."""
    outcomes: dict[str, dict[str, Any]] = {}
    done = {"status": "ok", "result": asdict(StepResult(figures={"answer": 42}))}

    def run_step(step: Step, dry: bool, outcome: Outcome) -> None:
        shown = {"title": step.title, "seconds": 1.0, "machine": "a machine"}
        outcome.begin(**shown, **outcomes.get(step.name, done))

    monkeypatch.setattr(gpu, "_run_step", run_step)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("GPU_DRY_RUN", "")
    return outcomes


def test_steps_that_run_later_or_again_keep_what_the_others_measured(
    outcomes: dict[str, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--dry", "--folder", str(tmp_path)]
    assert gpu.main(arguments) == 0
    [command] = re.findall("^next: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert command == f"make gpu DRY=1 'GPU_ARGS=--second --folder {tmp_path}'"
    outcomes["demo"] = outcomes["topk"] = {"status": "failed", "log": "ValueError: no such kernel"}
    assert gpu.main([*arguments, "--second"]) == 1
    again = f"make gpu DRY=1 'GPU_ARGS=--only topk demo --folder {tmp_path}'"
    assert capsys.readouterr().out.endswith(f"failed: topk, demo; to run them again: {again}\n")
    outcomes.clear()
    assert gpu.main([*arguments, "--only", "demo", "topk"]) == 0
    steps = Outcome(tmp_path / "gpu.json", "").of_all_steps()
    assert {name: step["status"] for name, step in steps.items()} == {step.name: "ok" for step in gpu.STEPS}
    assert (tmp_path / "gpu.md").read_text().count("- answer: 42") == len(gpu.STEPS)


@pytest.mark.parametrize("steps", [gpu.FIRST, gpu.SECOND])
def test_the_steps_of_a_command_take_less_than_ten_minutes(steps: tuple[Step, ...]) -> None:
    """With what is installed before the first of them."""
    assert sum(step.seconds for step in steps) <= 540


def test_claims_show_targets_and_ratios_to_peers() -> None:
    result = StepResult()
    result.claim("head", 54.0, "ms", {"parity": 57.0, "lead": 50.0}, {"Liger": 60.0, "it, published": 50.0})
    assert result.claims == [
        {
            "claim": "head",
            "measured": "54 ms",
            "targets": "parity <= 57: yes; lead <= 50: **no**",
            "measured / peer": "0.90 × Liger (60); 1.08 × it, published (50)",
        }
    ]


def test_times_stand_beside_those_of_the_fastest_that_is_not_ours() -> None:
    result = StepResult()
    seconds = {"ours": 0.0, "slow": 0.01, "slower": 0.05}
    ways = {name: Call(partial(lambda time_s, _: time.sleep(time_s), s)) for name, s in seconds.items()}
    result.compare("case", ways, seconds=0.0)
    assert result.units == {"case": "slow"}
    page = gpu.section(
        {"title": "Losses", "status": "ok", "seconds": 1.0, "machine": "", "result": asdict(result)}
    )
    assert re.search(r"^\| case \| ms \| × slow \|", page, re.MULTILINE)
    assert re.search(r"^\| slow \| [\d.]+ \| 1\.00 \|", page, re.MULTILINE)


def succeed(save: Any) -> None:
    save(StepResult(figures={"answer": 42}))


def fail(save: Any) -> None:
    succeed(save)
    raise ValueError("no such kernel")


def die(save: Any) -> None:
    succeed(save)
    os._exit(9)


def hang(save: Any) -> None:
    """Print the number of a process with a session of its own, which no interrupt ends, and wait."""
    succeed(save)
    stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    print(subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True).pid, flush=True)
    time.sleep(600)


@pytest.mark.slow
@pytest.mark.nightly
def test_other_steps_run_after_those_that_fail_die_and_hang_and_nothing_measured_is_lost(
    tmp_path: Path,
) -> None:
    seconds = {"fail": 100, "die": 100, "hang": 30, "succeed": 100}
    steps = [Step(name, name, most, __name__) for name, most in seconds.items()]
    assert gpu.run(steps, dry=False, folder=tmp_path) == ["fail", "die", "hang"]
    outcomes = Outcome(tmp_path / "gpu.json", "").of_all_steps()
    ends = [outcome["status"] for outcome in outcomes.values()]
    assert ends == ["failed", "failed", "not done in 30 s", "ok"]
    assert all(outcome["result"]["figures"] == {"answer": 42} for outcome in outcomes.values())
    assert outcomes["fail"]["log"].endswith("ValueError: no such kernel\n")
    log = outcomes["hang"]["log"]
    assert "in hang\n" in log and "Current thread" in log and log.endswith("KeyboardInterrupt\n")
    assert "ValueError: no such kernel" in (tmp_path / "gpu.md").read_text()
    [number] = (line for line in log.splitlines() if line.isdigit())
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(int(number)).status() != psutil.STATUS_ZOMBIE:  # until the test's time is up
            time.sleep(0.1)


def test_there_must_be_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as exit:
        gpu.main([])
    assert exit.value.code == 2
    assert "torch sees no GPU" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1250)  # A busy machine takes much longer than the two minutes of an idle one.
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
    options: dict[str, Any] = {"cwd": ROOT, "env": environ, "capture_output": True, "text": True}
    for arguments in (variables[-1], f"{variables[-1]} --second"):
        command = ["make", "gpu", *variables[:-1], arguments]
        done = subprocess.run(command, timeout=600, **options)
        assert done.returncode == 0, done.stdout + done.stderr
    steps = Outcome(tmp_path / "gpu.json", "").of_all_steps()
    assert {name: step["status"] for name, step in steps.items()} == {step.name: "ok" for step in gpu.STEPS}
    claims = [claim for step in steps.values() for claim in step["result"]["claims"]]
    assert any("parity <= 57" in claim["targets"] for claim in claims)
    assert "no measurement" in (tmp_path / "gpu.md").read_text()
