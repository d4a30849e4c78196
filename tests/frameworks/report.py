"""A pull request with the records of a night, and an issue about what they say anew.

    python -m tests.frameworks.report FOLDER

The folder has the records of the night. Nothing but them is taken from it, because code of frameworks has run
beside them. They are compared with those of the working tree. It needs ``git``, ``gh`` and ``GH_TOKEN``. It
imports only the standard library, because this runs with the right to write: nothing is installed for it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
VERDICTS = "tests/frameworks/verdicts.json"
RUNS = "tests/frameworks/runs.json"
RECORDS = (VERDICTS, RUNS, "docs/compatibility.md")
BRANCH = "nightly-records"
TITLE = "Verdicts and runs of the frameworks' main"
AUTHOR = (
    "-c",
    "user.name=github-actions[bot]",
    "-c",
    "user.email=41898282+github-actions[bot]@users.noreply.github.com",
)

Records = dict[str, list[dict[str, Any]]]
"""Path of a record -> its entries."""


def changes(before: Records, after: Records) -> dict[str, list[str]]:
    """Return what is judged in another way, or passed before and does not now: by source, a line for each."""
    lines: dict[str, list[str]] = {
        source: [] for source in _sources(before).values() if source in _sources(after).values()
    }
    old, new = _verdicts(before), _verdicts(after)
    for source, *site in sorted(old.keys() | new.keys()):
        was, now = (verdicts.get((source, *site), "absent") for verdicts in (old, new))
        if was != now and source in lines:
            lines[source].append(f"`{' '.join(site)}` was `{was}`, is `{now}`")
    for source, suite, ranks in sorted(_suites(before) - _suites(after)):
        if source in lines:
            lines[source].append(f"suite `{suite}` did not pass on {ranks} rank{'s' * (ranks > 1)}")
    return {source: found for source, found in lines.items() if found}


def _sources(records: Records) -> dict[str, str]:
    return {entry["commit"] or entry["source"]: entry["source"] for entry in records[VERDICTS]}


def _verdicts(records: Records) -> dict[tuple[str, ...], str]:
    return {
        (entry["source"], framework, patch, site): verdict
        for entry in records[VERDICTS]
        for framework, patches in entry["verdicts"].items()
        for patch, sites in patches.items()
        for site, verdict in sites.items()
    }


def _suites(records: Records) -> set[tuple[str, str, int]]:
    names = _sources(records)
    return {
        (names[run["source"]], suite, ranks)
        for run in records[RUNS]
        for suite, numbers in run["suites"].items()
        for ranks in numbers
    }


def text(lines: dict[str, list[str]]) -> str:
    return "\n".join(f"- {source}: {line}" for source in lines for line in lines[source])


def main(folder: Path) -> None:
    before, after = _load(ROOT), _load(folder)
    for path in RECORDS:
        shutil.copyfile(folder / path, ROOT / path)
    lines = changes(before, after)
    if _run("git", "status", "--porcelain", "--", *RECORDS):
        _propose(text(lines) or "No verdict changed, and every suite passed that passed before.")
    if lines:
        open_issue(f"Changed on main: {', '.join(lines)}", text(lines))


def _load(folder: Path) -> Records:
    return {path: json.loads((folder / path).read_text("utf-8")) for path in (VERDICTS, RUNS)}


def _propose(body: str) -> None:
    """Push the records to a branch of their own, and open a pull request unless one is open."""
    base = _run("git", "branch", "--show-current")
    _run("git", "switch", "--quiet", "--force-create", BRANCH)
    _run("git", *AUTHOR, "commit", "--quiet", f"--message={TITLE}", "--", *RECORDS)
    _run("gh", "auth", "setup-git")
    _run("git", "push", "--quiet", "--force", "origin", BRANCH)
    if not json.loads(_run("gh", "pr", "list", f"--head={BRANCH}", "--json=number")):
        _run("gh", "pr", "create", f"--base={base}", f"--head={BRANCH}", f"--title={TITLE}", f"--body={body}")


def open_issue(title: str, body: str) -> None:
    """Open an issue unless one with this title is open: every night finds the same until somebody acts."""
    issues = json.loads(_run("gh", "issue", "list", "--limit=200", "--json=title"))
    if title not in {issue["title"] for issue in issues}:
        _run("gh", "issue", "create", f"--title={title}", f"--body={body}")


def _run(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
