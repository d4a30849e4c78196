"""What happens every night, on repositories of our own: fetch ``main``, judge it, run it, report changes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks import mains, page, report, verdicts
from tests.frameworks.checkouts import REPOSITORIES
from tests.recording import write

STAND_INS = Path(__file__).with_name("stand_in")
MODEL = "slime/backends/megatron_utils/model.py"
TRAIN = "slime.backends.megatron_utils.model.train"
GIT = ["git", "-c", "user.name=x", "-c", "user.email=x"]

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


def test_a_page_without_the_main_that_conformance_ran_on() -> None:
    records = page.conformance_on_record([])
    assert len(records) == len(list(page.CONFORMANCE.glob("*.json")))
    assert all(name.startswith("Megatron-LM `") for name in records)


def test_every_suite_runs_whatever_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mains, "TESTS", (mains.HERE / "test_known_verdicts.py",))
    monkeypatch.setattr(mains, "TOGETHER", mains.TOGETHER[:2])
    record = tmp_path / "runs.json"
    write(page.runs_on_record(), record)
    assert mains.run(tmp_path, record, ["--collect-only", "-q"]) == 0
    assert json.loads(record.read_text()) == page.runs_on_record()
    assert mains.run(tmp_path, record, ["--no-such-option"]) == 2


# --- the report

GH = """#!{python}
import json, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[2] == "list":
    with open({answers!r}) as answers:
        print(json.dumps(json.load(answers)[sys.argv[1]]))
"""


class Night:
    """A clone of a repository with records, its ``origin``, and a stand-in for ``gh``."""

    def __init__(self, folder: Path) -> None:
        self.clone, self.origin, self.found = folder / "clone", folder / "origin", folder / "records"
        self._log, self._answers = folder / "gh.jsonl", folder / "answers.json"
        self.answer(pr=[], issue=[])
        self.origin.mkdir()
        git(self.origin, "init", "--quiet", "--bare", "--initial-branch=main")
        git(folder, "clone", "--quiet", str(self.origin), "clone")
        git(self.clone, "switch", "--quiet", "--force-create", "main")
        for path in report.RECORDS:
            for root in (self.clone, self.found):
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(report.ROOT / path, root / path)
        (self.found / "Makefile").write_text("what does not belong here")
        commit(self.clone)
        gh = folder / "bin" / "gh"
        gh.parent.mkdir()
        gh.write_text(GH.format(python=sys.executable, log=str(self._log), answers=str(self._answers)))
        gh.chmod(0o755)

    def answer(self, **lists: Any) -> None:
        self._answers.write_text(json.dumps(lists))

    def report(self) -> dict[str, list[str]]:
        """Report what was found; return the calls of ``gh``, each with its arguments."""
        report.main(self.found)
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        calls = [json.loads(line) for line in lines]
        return {" ".join(call[:2]): call[2:] for call in calls}

    @contextmanager
    def changed(self, path: str) -> Iterator[list[dict[str, Any]]]:
        """Change the entries of a record that was found."""
        entries = json.loads((self.found / path).read_text())
        yield entries
        (self.found / path).write_text(json.dumps(entries))

    def break_train(self) -> None:
        with self.changed(report.VERDICTS) as entries:
            slime_main(entries)["verdicts"]["slime"]["reentrant-train"][TRAIN] = "drifted: another parameter"


def slime_main(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return next(entry for entry in entries if entry["source"] == "slime main")


@pytest.fixture
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Night:
    night = Night(tmp_path)
    monkeypatch.setattr(report, "ROOT", night.clone)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return night


def test_nothing_new_is_not_reported(night: Night) -> None:
    assert night.report() == {}


def test_a_verdict_that_changed(night: Night) -> None:
    night.break_train()
    calls = night.report()
    assert list(calls) == ["auth setup-git", "pr list", "pr create", "issue list", "issue create"]
    assert {"--base=main", f"--head={report.BRANCH}"} <= set(calls["pr create"])
    body = f"--body=- slime main: `slime reentrant-train {TRAIN}` was `fits`, is `drifted: another parameter`"
    assert calls["issue create"] == ["--title=Changed on main: slime main", body]
    assert body in calls["pr create"]
    changed = git(night.origin, "diff-tree", "--name-only", "-r", "--root", "--no-commit-id", report.BRANCH)
    assert report.VERDICTS in changed.splitlines() and "Makefile" not in changed


def test_what_is_open_already_is_not_opened_again(night: Night) -> None:
    night.answer(pr=[{"number": 1}], issue=[{"title": "Changed on main: slime main"}])
    night.break_train()
    assert list(night.report()) == ["auth setup-git", "pr list", "issue list"]


def test_a_newer_commit_with_the_same_verdicts_needs_no_issue(night: Night) -> None:
    with night.changed(report.VERDICTS) as entries, night.changed(report.RUNS) as runs:
        for run in (run for run in runs if run["source"] == slime_main(entries)["commit"]):
            run["source"] = "f" * 40
        slime_main(entries)["commit"] = "f" * 40
    assert list(night.report()) == ["auth setup-git", "pr list", "pr create"]


def test_a_suite_that_did_not_pass_is_reported(night: Night) -> None:
    with night.changed(report.VERDICTS) as entries, night.changed(report.RUNS) as runs:
        for run in (run for run in runs if run["source"] == slime_main(entries)["commit"]):
            run["suites"]["rollouts"].remove(2)
    body = "--body=- slime main: suite `rollouts` did not pass on 2 ranks"
    assert night.report()["issue create"][1] == body
