"""``pytest --record FILE``: note which suites passed on which source, as data for ``docs/compatibility.md``.

A test of a suite carries ``@pytest.mark.runs(SUITE)``. It has a parameter ``ranks``, or the mark names the
numbers of ranks: ``runs(SUITE, ranks=[1, 2])``. Its fixtures call :func:`ran_on` with the source; a test that
does not runs on the megatron-core that is imported. A checkout is identified by its commit, so that one with
changes is refused. A suite is recorded for those numbers of ranks with which all of its tests passed.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import pytest

from tests import layers
from tests.worlds.files import git


class Run(TypedDict):
    """One entry of the record. A source is a commit, or a package and its version."""

    source: str
    megatron: str
    suites: dict[str, list[int]]
    python: str
    torch: str
    date: str


def add_option(parser: pytest.Parser) -> None:
    for option, what in (
        ("--record", "which suites passed on which source"),
        ("--record-models", "which models kept which promise"),
        ("--record-stand-in", "how the stand-in's layers differ from local ones"),
    ):
        parser.addoption(option, type=Path, metavar="FILE", help=f"note in FILE {what}")


def configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "runs(suite, ranks): a test of a suite that --record notes")
    config.addinivalue_line("markers", "promise(name): a row of the table that --record-models notes")
    if differences := config.getoption("--record-stand-in"):
        os.environ["RECORD_STAND_IN"] = os.path.abspath(differences)  # for ranks
    if models := config.getoption("--record-models"):
        config.pluginmanager.register(_ModelRecorder(models))
    file = config.getoption("--record")
    if file is None:
        return
    selections = [config.getoption(name, None) for name in ("keyword", "markexpr", "deselect", "lf")]
    if any(selections) or any("::" in argument for argument in config.args):
        raise pytest.UsageError(
            '--record: a suite passes when all of its tests do; add -m "", no -k and no --lf'
        )
    config.pluginmanager.register(_Recorder(file))


def ran_on(request: pytest.FixtureRequest, source: str, megatron: str) -> None:
    """Note what the test runs on: folders of checkouts, or packages as ``NAME VERSION``."""
    if request.config.getoption("--record"):
        where = tuple(commit_of(each) if Path(each).is_dir() else each for each in (source, megatron))
        request.node.user_properties.append(("ran on", where))


def installed(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"


def commit_of(folder: str) -> str:
    """Return the commit of a checkout.

    Raises:
        pytest.UsageError: files were changed after the checkout.
    """
    try:
        changes, commit = git(folder, "status", "--porcelain", "--", "."), git(folder, "rev-parse", "HEAD")
    except subprocess.CalledProcessError as error:
        raise pytest.UsageError(f"--record identifies a checkout by its commit: {error.stderr}") from None
    if changes:
        raise pytest.UsageError(f"{folder} is not what its commit says:\n{changes}")
    return commit


def note_differences(name: str, differences: Sequence[float]) -> None:
    """Note, on the first rank, how much losses and gradients of layers differ: ``--record-stand-in``."""
    if "RECORD_STAND_IN" in os.environ and os.environ["RANK"] == "0":
        file = Path(os.environ["RECORD_STAND_IN"])
        record = json.loads(file.read_text()) if file.exists() else {}
        release = importlib.metadata.version("megatron-core")
        record.setdefault(release, {})[name] = [f"{value:.0e}" for value in differences]
        file.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


class _Recorder:
    def __init__(self, file: Path) -> None:
        self.file = file
        # (source, megatron) -> (suite, ranks) -> whether all tests passed
        self.passed: dict[tuple[str, str], dict[tuple[str, int], bool]] = {}

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        mark = item.get_closest_marker("runs")
        if mark is not None:
            callspec = getattr(item, "callspec", None)
            ranks = (callspec.params.get("ranks") if callspec else None) or mark.kwargs["ranks"]
            item.user_properties.append(("run", (mark.args[0], [ranks] if isinstance(ranks, int) else ranks)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: dict[str, Any] = dict(report.user_properties)
        if "run" not in properties or not (report.failed or (report.when == "call" and report.passed)):
            return
        where = properties.get("ran on") or (installed("megatron-core"),) * 2
        suites = self.passed.setdefault(where, {})
        suite, rank_counts = properties["run"]
        for ranks in rank_counts:
            suites[suite, ranks] = suites.get((suite, ranks), True) and report.passed

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        finished = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        # Workers of pytest-xdist note what each test is, and report to the process that records.
        if session.shouldfail or not finished or hasattr(session.config, "workerinput"):
            return
        runs: list[Run] = json.loads(self.file.read_text()) if self.file.exists() else []
        for where, passed in self.passed.items():
            merge(runs, where, passed)
        write(runs, self.file)


def write(runs: Sequence[Run], file: Path) -> None:
    lines = ",\n".join(json.dumps(run) for run in runs)
    file.write_text(f"[\n{lines}\n]\n")


def merge(runs: list[Run], where: tuple[str, str], passed: dict[tuple[str, int], bool]) -> None:
    """Add what has passed to the record, and remove what failed this time."""
    source, megatron = where
    recorded = {key for key, all_passed in passed.items() if all_passed}
    for run in [run for run in runs if (run["source"], run["megatron"]) == where]:
        before = {(suite, ranks) for suite, rank_counts in run["suites"].items() for ranks in rank_counts}
        recorded |= before - passed.keys()
        runs.remove(run)
    if recorded:
        runs.append(
            {
                "source": source,
                "megatron": megatron,
                "suites": {
                    suite: sorted(ranks for name, ranks in recorded if name == suite)
                    for suite in sorted({name for name, _ in recorded})
                },
                "python": platform.python_version(),
                "torch": importlib.metadata.version("torch"),
                "date": datetime.date.today().isoformat(),
            }
        )
    runs.sort(key=lambda run: (run["source"], run["megatron"]))


class _ModelRecorder:
    """Notes the parameters, "MODEL, LAYOUT", with which the tests of a promise passed.

    They stand under the layers and the release that the tests ran with.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.passed: dict[tuple[str, str], bool] = {}

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if mark := item.get_closest_marker("promise"):
            item.user_properties.append(("promise", (mark.args[0], item.callspec.id)))  # type: ignore[attr-defined]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        promise = dict(report.user_properties).get("promise")
        if promise and (report.failed or (report.when == "call" and report.passed)):
            self.passed[promise] = self.passed.get(promise, True) and report.passed

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        folder = session.config.getoption("--megatron-core")
        release = importlib.metadata.version("megatron-core")
        if folder and Path(folder).is_dir():
            release = f"main {commit_of(folder)[:9]}"
        whole = json.loads(self.file.read_text()) if self.file.exists() else {}
        record = whole.setdefault(layers.chosen(), {})
        cells = {promise: set(names) for promise, names in record.get(release, {}).items()}
        for (promise, cell), passed in self.passed.items():
            cells.setdefault(promise, set()).discard(cell)
            if passed:
                cells[promise].add(cell)
        record[release] = {promise: sorted(names) for promise, names in sorted(cells.items())}
        self.file.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")
