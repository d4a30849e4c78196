"""``--record FILE``: only what has passed, on a commit that is what it says, is on record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.recording import commit_of

REPOSITORY = Path(__file__).parents[2]
CONFTEST = "from tests.conftest import pytest_addoption, pytest_configure\n"
TESTS = """\
import os
import pytest
from tests.recording import ran_on

@pytest.fixture
def framework(request):
    ran_on(request, os.environ["HOST"], "megatron-core 1.2")

@pytest.mark.runs("training")
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("part", ["first", "second"])
def test_training(framework, ranks, part):
    if ranks == 4:
        pytest.skip("too many")
    assert os.environ["BREAKS"] != f"{part} {ranks}"

@pytest.mark.runs("losses", ranks=[1, 2])
def test_losses(): ...

def test_something_else(): ...
"""


@pytest.fixture
def framework(tmp_path: Path) -> Path:
    folder = tmp_path / "framework"
    folder.mkdir()
    (folder / "train.py").touch()
    git = ["git", "-C", str(folder), "-c", "user.name=Any", "-c", "user.email=any@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "framework"]):
        subprocess.run([*git, *command], check=True)
    return folder


def run(framework: Path, *options: str, breaks: str = "") -> subprocess.CompletedProcess[str]:
    folder = framework.parent / "own"
    folder.mkdir(exist_ok=True)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -m 'not slow'\n")
    (folder / "test_framework.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_framework.py", "-m", ""]
    environ = {**os.environ, "HOST": str(framework), "BREAKS": breaks, "PYTHONPATH": str(REPOSITORY)}
    record = f"--record={framework.parent / 'runs.json'}"
    return subprocess.run(
        [*command, record, *options],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def recorded(framework: Path) -> dict[str, Any]:
    return {run["source"]: run for run in json.loads((framework.parent / "runs.json").read_text())}


@pytest.mark.slow
def test_what_passes_is_recorded_and_what_fails_is_struck_out(framework: Path) -> None:
    assert run(framework).returncode == 0
    entry = recorded(framework)[commit_of(str(framework))]
    assert entry["megatron"] == "megatron-core 1.2"
    assert entry["suites"] == {"training": [1, 2]}
    [own] = [run for source, run in recorded(framework).items() if source.startswith("megatron-core ")]
    assert own["suites"] == {"losses": [1, 2]}

    assert run(framework, breaks="first 2").returncode == 1
    assert recorded(framework)[entry["source"]]["suites"] == {"training": [1]}

    # So is the selection that the configuration makes, which run() lifts by another -m.
    assert "a suite passes when all of its tests do" in run(framework, "-m", "not slow").stderr
