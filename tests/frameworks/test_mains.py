"""What happens every night, on repositories of our own: fetch ``main``, judge it, run it, report changes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.frameworks import mains, page, verdicts
from tests.frameworks.checkouts import REPOSITORIES
from tests.recording import write

MODEL = "slime/backends/megatron_utils/model.py"
TRAIN = "slime.backends.megatron_utils.model.train"
RECORDS = ("docs/compatibility.md", "tests/frameworks/runs.json", "tests/frameworks/verdicts.json")
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def git(folder: Path, *command: str) -> str:
    git = ["git", "-c", "user.name=x", "-c", "user.email=x", "-C", str(folder)]
    return subprocess.run([*git, *command], check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


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
    shutil.copytree(mains.HERE / "stand_in" / "slime", folder / "THUDM/slime/slime")
    for repository in REPOSITORIES.values():
        commit(folder / repository)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://{folder}/.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://github.com/")
    return folder


def test_main_is_fetched_and_judged(upstream: Path, tmp_path: Path) -> None:
    checkouts, slime = tmp_path / "checkouts", upstream / "THUDM/slime"
    mains.fetch(checkouts)
    first = {known.source: known for known in mains.judge(checkouts, [])}
    assert first["slime main"].verdicts["slime"]["reentrant-train"][TRAIN] == "fits"
    megatron = {source: known.commit for source, known in first.items() if source.startswith("Megatron-LM ")}
    assert set(megatron) == {"Megatron-LM main", "Megatron-LM for slime main"}
    assert len(set(megatron.values())) == 2

    (slime / MODEL).write_text(re.sub(r"\ndef train\(", "\ndef train_anew(", (slime / MODEL).read_text()))
    newest = commit(slime)
    mains.fetch(checkouts)
    second = {known.source: known for known in mains.judge(checkouts, [*first.values()])}
    changed = second.pop("slime main")
    assert changed.commit == newest
    assert changed.verdicts["slime"]["reentrant-train"][TRAIN].startswith("missing")
    assert second == {source: known for source, known in first.items() if source != "slime main"}
    after = [changed, *second.values()]
    assert mains.changed_sources([*first.values()], after) == ["slime main"]
    assert mains.changed_sources(after[1:], after) == mains.changed_sources(after, after) == []

    (slime / "docker/Dockerfile").write_text("FROM scratch\n")
    commit(slime)
    with pytest.raises(SystemExit, match="MEGATRON_COMMIT"):
        mains.fetch(checkouts)


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
echo "$@" >> {folder}/log
if [ "$1 $2" = "pr list" ]; then cat {folder}/open; fi
"""


def test_changed_records_become_a_pull_request_unless_one_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a clone with records, beside what a night has left, and with a stand-in for ``gh``."""
    git(tmp_path, "init", "--quiet", "--bare", "--initial-branch=main", "origin")
    git(tmp_path, "clone", "--quiet", "origin", "clone")
    for file in RECORDS:
        for root in ("clone", "records"):
            (tmp_path / root / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, tmp_path / root / file)
    shutil.copy(ROOT / "Makefile", tmp_path / "clone")
    (tmp_path / "records" / "Makefile").write_text("what does not belong here")
    commit(tmp_path / "clone")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gh").write_text(GH.format(folder=tmp_path))
    (tmp_path / "bin" / "gh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def reported(changed: str | None, is_open: str = "[]") -> list[str]:
        """Report what a night has left; return the calls of ``gh``."""
        (tmp_path / "log").write_text("")
        (tmp_path / "open").write_text(is_open)
        if changed is not None:
            (tmp_path / "records" / RECORDS[1]).write_text(changed)
        subprocess.run(["make", "report", "RECORDS=../records"], cwd=tmp_path / "clone", check=True)
        return (tmp_path / "log").read_text().splitlines()

    assert reported(None) == []
    listed = "pr list --head=nightly-records --json=number"
    assert reported("[]") == ["auth setup-git", listed, "pr create --fill"]
    changed = git(tmp_path / "origin", "show", "--name-only", "--format=", "nightly-records")
    assert changed.splitlines() == [RECORDS[1]]
    assert reported("[1]", '[{"number": 1}]') == ["auth setup-git", listed]
