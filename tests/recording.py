"""``pytest --record FILE``: on which source a suite has passed, as data for ``docs/compatibility.md``.

A test that is a run for real carries ``@pytest.mark.runs(SUITE)``, and takes the number of ranks as its
parameter ``ranks``, or says it: ``runs(SUITE, ranks=[1, 2])``. What it ran on, its fixtures say with
:func:`ran_on`; without, that is the megatron-core that is imported. A checkout is known by its commit, so one
with changes in it is refused. A suite is on record for as many ranks as all of its tests have passed with.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path
from typing import Any, TypedDict

import pytest


class Run(TypedDict):
    """One entry of the record. A source is a commit, or a package with its version."""

    source: str
    megatron: str
    suites: dict[str, list[int]]
    python: str
    torch: str
    date: str


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record", type=Path, metavar="FILE", help="note in FILE which suites passed on which source"
    )


def configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "runs(suite, ranks): a run for real, noted by --record")
    file = config.getoption("--record")
    if file is None:
        return
    chosen = [config.getoption(name, None) for name in ("keyword", "markexpr", "deselect", "lf")]
    if any(chosen) or any("::" in argument for argument in config.args):
        raise pytest.UsageError("--record needs whole files: a suite passes when all of its tests do")
    if not hasattr(config, "workerinput"):  # of pytest-xdist, which reports to the process that records
        config.pluginmanager.register(_Recorder(file))


def ran_on(request: pytest.FixtureRequest, source: str, megatron: str) -> None:
    """Say what the test runs on: folders of checkouts, or packages as ``NAME VERSION``."""
    if request.config.getoption("--record"):
        request.node.user_properties.append(("ran on", (_identity(source), _identity(megatron))))


def installed(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"


def commit_of(folder: str) -> str:
    """The commit of a checkout, which is as it was checked out."""
    if changes := _git(folder, "status", "--porcelain", "--", "."):
        raise pytest.UsageError(f"{folder} is not what its commit says:\n{changes}")
    return _git(folder, "rev-parse", "HEAD")


def _identity(source: str) -> str:
    return commit_of(source) if Path(source).is_dir() else source


def _git(folder: str, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise pytest.UsageError(f"--record knows a checkout by its commit: {done.stderr.strip()}")
    return done.stdout.strip()


class _Recorder:
    def __init__(self, file: Path) -> None:
        self.file = file
        # (source, megatron) -> (suite, ranks) -> whether all have passed
        self.passed: dict[tuple[str, str], dict[tuple[str, int], bool]] = {}

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        mark = item.get_closest_marker("runs")
        if mark is not None:
            given = getattr(item, "callspec", None)
            ranks = (given.params.get("ranks") if given else None) or mark.kwargs["ranks"]
            item.user_properties.append(("run", (mark.args[0], [ranks] if isinstance(ranks, int) else ranks)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        noted: dict[str, Any] = dict(report.user_properties)
        if "run" not in noted or not (report.failed or (report.when == "call" and report.passed)):
            return
        where = noted.get("ran on") or (installed("megatron-core"),) * 2
        suites = self.passed.setdefault(where, {})
        suite, all_ranks = noted["run"]
        for ranks in all_ranks:
            suites[suite, ranks] = suites.get((suite, ranks), True) and report.passed

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        finished = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if session.shouldfail or not finished:
            return
        runs: list[Run] = json.loads(self.file.read_text()) if self.file.exists() else []
        for where, passed in self.passed.items():
            merge(runs, where, passed)
        lines = ",\n".join(json.dumps(run) for run in runs)
        self.file.write_text(f"[\n{lines}\n]\n")


def merge(runs: list[Run], where: tuple[str, str], passed: dict[tuple[str, int], bool]) -> None:
    """Note what has passed, and strike out what now fails."""
    source, megatron = where
    ran = {key for key, good in passed.items() if good}
    for run in [run for run in runs if (run["source"], run["megatron"]) == where]:
        before = {(suite, ranks) for suite, all_ranks in run["suites"].items() for ranks in all_ranks}
        ran |= before - passed.keys()
        runs.remove(run)
    if ran:
        runs.append(
            {
                "source": source,
                "megatron": megatron,
                "suites": {
                    suite: sorted(ranks for name, ranks in ran if name == suite)
                    for suite in sorted({name for name, _ in ran})
                },
                "python": platform.python_version(),
                "torch": importlib.metadata.version("torch"),
                "date": datetime.date.today().isoformat(),
            }
        )
    runs.sort(key=lambda run: (run["source"], run["megatron"]))
