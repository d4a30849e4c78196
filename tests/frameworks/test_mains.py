"""What happens every night, on repositories of our own: fetch ``main``, judge it, run it, report changes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks import mains, page, verdicts
from tests.frameworks.checkouts import REPOSITORIES
from tests.recording import write

STAND_INS = Path(__file__).with_name("stand_in")
MODEL = "slime/backends/megatron_utils/model.py"
TRAIN = "slime.backends.megatron_utils.model.train"
GIT = ["git", "-c", "user.name=x", "-c", "user.email=x"]

RECORDS = ("docs/compatibility.md", "tests/frameworks/runs.json", "tests/frameworks/verdicts.json")
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def git(folder: Path, *command: str) -> str:
    return subprocess.run(
        [*GIT, "-C", str(folder), *command], check=True, text=True, stdout=subprocess.PIPE
    ).stdout.strip()


def commit(folder: Path) -> str:
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--allow-empty", "--message=x")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of https://github.com, with a repository per framework."""
    folder = tmp_path / "upstream"
    for repository in REPOSITORIES.values():
        (folder / repository).mkdir(parents=True)
        git(folder / repository, "init", "--quiet", "--initial-branch=main")
        (folder / repository / "setup.py").write_text(f"# of {repository}")
    pinned = commit(folder / "NVIDIA/Megatron-LM")
    for place in ("THUDM/slime", "Gen-Verse/OpenClaw-RL/slime"):
        (folder / place / "docker").mkdir(parents=True)
        (folder / place / "docker/Dockerfile").write_text(f"ARG MEGATRON_COMMIT={pinned}\n")
    shutil.copytree(STAND_INS / "slime", folder / "THUDM/slime/slime")
    for repository in REPOSITORIES.values():
        commit(folder / repository)
    for name, value in (
        ("COUNT", "1"),
        ("KEY_0", f"url.file://{folder}/.insteadOf"),
        ("VALUE_0", "https://github.com/"),
    ):
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    return folder


def states(table: list[verdicts.Known]) -> dict[str, Any]:
    return {known.source: known.verdicts for known in table}


def test_main_is_fetched_and_judged(upstream: Path, tmp_path: Path) -> None:
    checkouts = tmp_path / "checkouts"
    mains.fetch(checkouts)
    first = mains.judge(checkouts, [])
    assert states(first)["slime main"]["slime"]["reentrant-train"][TRAIN] == "fits"
    megatron = {known.source: known.commit for known in first if known.source.startswith("Megatron-LM ")}
    assert set(megatron) == {"Megatron-LM main", "Megatron-LM for slime main"}
    assert len(set(megatron.values())) == 2

    model = upstream / "THUDM/slime" / MODEL
    model.write_text(re.sub(r"^def train\(", "def train_anew(", model.read_text(), flags=re.MULTILINE))
    newest = commit(upstream / "THUDM/slime")
    mains.fetch(checkouts)
    second = mains.judge(checkouts, first)
    [slime] = (known for known in second if known.source == "slime main")
    assert slime.commit == newest
    assert slime.verdicts["slime"]["reentrant-train"][TRAIN].startswith("missing")
    others = [known for known in first if known.source != "slime main"]
    assert [known for known in second if known.source != "slime main"] == others
    assert mains.changed_sources(first, second) == ["slime main"]
    assert mains.changed_sources(second[1:], second) == mains.changed_sources(second, second) == []


def test_a_framework_that_pins_elsewhere_is_an_error(upstream: Path, tmp_path: Path) -> None:
    (upstream / "THUDM/slime/docker/Dockerfile").write_text("FROM scratch\n")
    commit(upstream / "THUDM/slime")
    with pytest.raises(SystemExit, match="MEGATRON_COMMIT"):
        mains.fetch(tmp_path / "checkouts")


def test_runs_of_sources_that_left_the_table_are_dropped() -> None:
    table, runs = verdicts.load(), page.runs_on_record()
    assert mains.of_known_sources(runs, table) == runs
    gone = runs[0]["source"]
    kept = mains.of_known_sources(runs, [known for known in table if known.identity != gone])
    assert kept == [run for run in runs if gone not in (run["source"], run["megatron"])]


def test_every_suite_runs_whatever_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mains, "TESTS", (mains.HERE / "test_known_verdicts.py",))
    monkeypatch.setattr(mains, "TOGETHER", mains.TOGETHER[:2])
    record = tmp_path / "runs.json"
    write(page.runs_on_record(), record)
    assert mains.run(tmp_path, record, ["--collect-only", "-q"]) == 0
    assert json.loads(record.read_text()) == page.runs_on_record()
    assert mains.run(tmp_path, record, ["--no-such-option"]) == 2


GH = """#!/bin/sh
echo "$@" >> {log}
if [ "$1 $2" = "pr list" ]; then cat {open}; fi
"""


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone of a repository with records, beside it what a night has left, and a stand-in for ``gh``."""
    git(tmp_path, "init", "--quiet", "--bare", "--initial-branch=main", "origin")
    git(tmp_path, "clone", "--quiet", "origin", "clone")
    for file in RECORDS:
        for root in ("clone", "records"):
            (tmp_path / root / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, tmp_path / root / file)
    shutil.copy(ROOT / "Makefile", tmp_path / "clone")
    (tmp_path / "records" / "Makefile").write_text("what does not belong here")
    commit(tmp_path / "clone")
    (tmp_path / "open").write_text("[]")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gh").write_text(GH.format(log=tmp_path / "log", open=tmp_path / "open"))
    (tmp_path / "bin" / "gh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "clone"


def reported(clone: Path) -> list[str]:
    """Report what a night has left; return the calls of ``gh``."""
    (log := clone.parent / "log").write_text("")
    subprocess.run(["make", "report", "RECORDS=../records"], cwd=clone, check=True)
    return log.read_text().splitlines()


def test_changed_records_become_a_pull_request_unless_one_is_open(clone: Path) -> None:
    assert reported(clone) == []
    (clone.parent / "records" / RECORDS[1]).write_text("[]")
    listed = "pr list --head=nightly-records --json=number"
    assert reported(clone) == ["auth setup-git", listed, "pr create --fill"]
    changed = git(clone.parent / "origin", "show", "--name-only", "--format=", "nightly-records")
    assert changed.splitlines() == [RECORDS[1]]
    (clone.parent / "records" / RECORDS[1]).write_text("[1]")
    (clone.parent / "open").write_text('[{"number": 1}]')
    assert reported(clone) == ["auth setup-git", listed]
