"""``--record FILE``: only what has passed, on a commit that is what it says, is on record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.recording import commit_of, merge

REPOSITORY = Path(__file__).parents[2]
CONFTEST = "from tests.conftest import pytest_addoption, pytest_configure\n"
TESTS = """\
import os
import pytest
from tests.recording import ran_on

@pytest.fixture
def host(request):
    ran_on(request, os.environ["HOST"], "megatron-core 1.2")

@pytest.mark.runs("training")
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("part", ["first", "second"])
def test_training(host, ranks, part):
    if ranks == 4:
        pytest.skip("too many")
    assert os.environ["BREAKS"] != f"{part} {ranks}"

@pytest.mark.runs("losses", ranks=[1, 2])
def test_losses(): ...

def test_something_else(): ...
"""


@pytest.fixture
def host(tmp_path: Path) -> Path:
    folder = tmp_path / "host"
    folder.mkdir()
    (folder / "train.py").touch()
    git = ["git", "-C", str(folder), "-c", "user.name=Any", "-c", "user.email=any@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "host"]):
        subprocess.run([*git, *command], check=True)
    return folder


def run(host: Path, *options: str, breaks: str = "") -> subprocess.CompletedProcess[str]:
    folder = host.parent / "own"
    folder.mkdir(exist_ok=True)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_host.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", "test_host.py"]
    environ = {**os.environ, "HOST": str(host), "BREAKS": breaks, "PYTHONPATH": str(REPOSITORY)}
    told = f"--record={host.parent / 'runs.json'}"
    return subprocess.run(
        [*command, told, *options],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def recorded(host: Path) -> dict[str, Any]:
    return {run["source"]: run for run in json.loads((host.parent / "runs.json").read_text())}


def test_what_passes_is_recorded_and_what_fails_is_struck_out(host: Path) -> None:
    assert run(host).returncode == 0
    entry = recorded(host)[commit_of(str(host))]
    assert entry["megatron"] == "megatron-core 1.2"
    assert entry["suites"] == {"training": [1, 2]}
    [own] = [run for source, run in recorded(host).items() if source.startswith("megatron-core ")]
    assert own["suites"] == {"losses": [1, 2]}

    assert run(host, breaks="first 2").returncode == 1
    assert recorded(host)[entry["source"]]["suites"] == {"training": [1]}


def test_a_changed_checkout_is_refused(host: Path) -> None:
    (host / "train.py").write_text("# mended by hand")
    refused = run(host)
    assert "is not what its commit says" in refused.stdout
    assert all(source.startswith("megatron-core ") for source in recorded(host))


def test_a_part_of_a_suite_is_refused(host: Path) -> None:
    refused = run(host, "-k", "first")
    assert "a suite passes when all of its tests do" in refused.stderr
    assert not (host.parent / "runs.json").exists()


def test_an_unfinished_session_is_not_recorded(host: Path) -> None:
    assert run(host, "-x", breaks="second 2").returncode == 1
    assert not (host.parent / "runs.json").exists()


def test_other_suites_of_a_former_session_stay() -> None:
    runs: list[Any] = []
    merge(runs, ("abc", "def"), {("losses", 1): True, ("teacher", 2): True})
    merge(runs, ("abc", "def"), {("losses", 1): False, ("losses", 2): True})
    merge(runs, ("abc", "other"), {("losses", 1): True})
    assert [(run["megatron"], run["suites"]) for run in runs] == [
        ("def", {"losses": [2], "teacher": [2]}),
        ("other", {"losses": [1]}),
    ]
    merge(runs, ("abc", "other"), {("losses", 1): False})
    assert [run["megatron"] for run in runs] == ["def"]
