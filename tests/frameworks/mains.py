"""``main`` of each framework: fetched, judged, run for real. What is found goes on record.

    python -m tests.frameworks.mains fetch FOLDER    # clone them, or bring the clones up to date
    python -m tests.frameworks.mains judge FOLDER    # into verdicts.json
    python -m tests.frameworks.mains run FOLDER      # into runs.json; further arguments are pytest's

The page ``docs/compatibility.md`` is written anew by the last two.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.frameworks import page, verdicts
from tests.frameworks.checkouts import DIRECTORIES, REPOSITORIES
from tests.frameworks.verdicts import Known
from tests.recording import commit_of, write

HERE = Path(__file__).parent
#: Checkout of Megatron-LM -> the file of a framework that names its revision.
PINS = {
    "Megatron-LM-for-slime": "slime/docker/Dockerfile",
    "Megatron-LM-for-OpenClaw-RL": "OpenClaw-RL/slime/docker/Dockerfile",
}
#: What runs together: variables of ``make test-frameworks`` -> folders. vime and miles run on slime's pin.
TOGETHER = (
    {
        "SLIME_DIR": "slime",
        "VIME_DIR": "vime",
        "MILES_DIR": "miles",
        "VERL_DIR": "verl",
        "MEGATRON_LM_DIR": "Megatron-LM-for-slime",
    },
    {"SLIME_DIR": "OpenClaw-RL/slime", "MEGATRON_LM_DIR": "Megatron-LM-for-OpenClaw-RL"},
    {"MEGATRON_LM_DIR": "Megatron-LM"},
)
TESTS = (*sorted(HERE.glob("test_real_*.py")), HERE / "test_own_tests.py")


def fetch(folder: Path) -> None:
    for name in REPOSITORIES:
        _check_out(folder / name, name, "main")
    for name, file in PINS.items():
        commit = re.search(r"^ARG MEGATRON_COMMIT=([0-9a-f]{40})$", (folder / file).read_text(), re.MULTILINE)
        if commit is None:
            raise SystemExit(f"{folder / file} no longer has a line ARG MEGATRON_COMMIT=…: adapt {__file__}")
        _check_out(folder / name, "Megatron-LM", commit[1])


def _check_out(checkout: Path, name: str, revision: str) -> None:
    """Only the one commit is fetched. Files of the large file storage stay pointers."""
    git = ["git", "-C", str(checkout)]
    checkout.mkdir(parents=True, exist_ok=True)
    for command in (
        ["init", "--quiet"],
        ["fetch", "--quiet", "--depth=1", f"https://github.com/{REPOSITORIES[name]}", revision],
        ["checkout", "--quiet", "--force", "--detach", "FETCH_HEAD"],
    ):
        subprocess.run([*git, *command], check=True, env={**os.environ, "GIT_LFS_SKIP_SMUDGE": "1"})


def judge(folder: Path, table: Sequence[Known]) -> list[Known]:
    """Return the table with what the checkouts are today in the place of what they were."""
    judged = {known.source: known for known in table}
    for name in (*REPOSITORIES, *PINS):
        source = f"{name.replace('-for-', ' for ')} main"
        commit = commit_of(str(folder / name))
        if name in PINS and commit in {known.commit for known in judged.values() if known.source != source}:
            judged.pop(source, None)  # as the revision that a release pins, too, or as main
            continue
        today = verdicts.judge_commit(source, str(folder / name), commit)
        if judged.get(source) != today:  # else the order of the patches on record stays
            judged[source] = today
    return list(judged.values())


def changed_sources(before: Sequence[Known], after: Sequence[Known]) -> list[str]:
    """Return the sources that are judged in another way than before."""
    old = {known.source: known.verdicts for known in before}
    return [known.source for known in after if old.get(known.source, known.verdicts) != known.verdicts]


def run(folder: Path, record: Path, arguments: Sequence[str]) -> int:
    """Run the suites, all of them whatever fails; return how many calls of pytest failed."""
    pytest = [sys.executable, "-m", "pytest", "-m", "", f"--record={record}", *map(str, TESTS), *arguments]
    failed = 0
    for places in TOGETHER:
        directories = {name: str(folder / places[name]) if name in places else "" for name in DIRECTORIES}
        failed += subprocess.run(pytest, env={**os.environ, **directories}, check=False).returncode != 0
    return failed


def main(command: str, place: str, *arguments: str) -> int:
    folder, failed = Path(place).absolute(), 0
    if command == "fetch":
        fetch(folder)
    elif command == "judge":
        before = verdicts.load()
        table = judge(folder, before)
        verdicts.save(table)
        failed = len(changed := changed_sources(before, table))
        print(*(f"{source}: a verdict changed" for source in changed), sep="\n")
        known = {one.identity for one in table}
        runs = [run for run in page.runs_on_record() if {run["source"], run["megatron"]} <= known]
        write(runs, page.RUNS)
    elif command == "run":
        failed = run(folder, page.RUNS, arguments)
    else:
        raise SystemExit(f"{command!r} is none of fetch, judge, run")
    page.PAGE.write_text(page.page_of_records())
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
