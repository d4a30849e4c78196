"""A pytest plugin that runs Megatron-LM's own unit tests on a CPU, each rank a process on gloo::

    cd Megatron-LM
    PYTHONPATH=.../tests/lab python -m pytest -p conformance.plugin -o addopts="" --ranks 2 tests/unit_tests

The tests and their conftest are taken from the checkout as they are. They are collected once; the ranks are
forks of that process, made anew for each test file and after each test that did not pass, so that neither
files nor failures affect what comes after them.
"""

import gc
import os
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, closing, suppress
from functools import partial
from importlib import import_module
from itertools import groupby, product
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from _pytest._code import TracebackEntry

from megatron_rl_patches.testing.cpu_backend import cpu_backend
from megatron_rl_patches.testing.rank_pool import Outcome, RankPool, group_variables, send

from .runs import FAILED, HANGS, NOT_RUNNABLE, PASSED, SKIPPED, Result, read_results, reason_of

Report = pytest.TestReport | pytest.CollectReport
_MESSAGE_LENGTH = 2000
_DOWNLOAD = "tests.test_utils.python_scripts.download_unit_tests_dataset"
_until_exit = ExitStack()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("megatron-lm", "unit tests of Megatron-LM on a CPU")
    group.addoption("--ranks", type=int, default=1, metavar="N", help="number of ranks (default: 1)")
    group.addoption("--patches", default="", metavar="NAMES", help="patches to apply: names, or all")
    group.addoption("--hang-after", type=float, default=60.0, metavar="SECONDS", help="default: 60")
    group.addoption(
        "--results", type=Path, default=os.devnull, help="gets a line per test; leave out its tests"
    )
    group.addoption("--only", type=Path, metavar="FILE", help="run only the tests that this file lists")
    group.addoption("--transformer-engine", action="store_true", help="have its stand-in in place")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    options = early_config.known_args_namespace
    checkout = early_config.rootpath
    if not (checkout / "megatron" / "core").is_dir():
        raise pytest.UsageError(f"{checkout} is no checkout of Megatron-LM")
    os.environ.update(group_variables(options.ranks, port=0), RANK="0", LOCAL_RANK="0")
    # A group connects its ranks when it is used first. Most groups of a test never are.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests that miss a file wait for the network otherwise
    sys.path.insert(0, str(checkout))
    # An installed megatron-core may be a regular package, which would win over the checkout's namespace.
    namespace = ModuleType("megatron")
    namespace.__path__ = [str(checkout / "megatron")]
    sys.modules["megatron"] = namespace
    # The conftest downloads data by a function of this module, which has another name in some releases.
    sys.modules[_DOWNLOAD] = mock.Mock()

    import torch

    torch.set_num_threads(1)
    _until_exit.enter_context(cpu_backend(transformer_engine=options.transformer_engine))
    if options.patches:
        import megatron_rl_patches

        names = () if options.patches == "all" else options.patches.split(",")
        megatron_rl_patches.apply(*names)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Conductor(config), "megatron-tests-conductor")
    config.add_cleanup(_until_exit.close)


def _utils() -> Any:
    """Return Megatron's class that initializes and destroys process groups for its tests."""
    with suppress(ImportError, AttributeError):
        return import_module("tests.unit_tests.test_utilities").Utils
    return mock.Mock(inited=False)


class _Conductor:
    """Runs the collected tests on the ranks and records what became of them."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.options = config.option
        self._what = self.options.ranks, self.options.patches
        known = read_results(self.options.results)
        self._known = {result.nodeid for result in known if (result.ranks, result.patches) == self._what}

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        # Some files initialize torch.distributed when they are imported, and a fork cannot use its groups.
        nothing = {f"initialize_{what}": mock.DEFAULT for what in ("distributed", "model_parallel")}
        with mock.patch.multiple(_utils(), **nothing):
            return (yield)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        only: Path | None = self.options.only
        listed = set(only.read_text().splitlines() if only else ())
        items[:] = [
            item
            for item in items
            if item.nodeid not in self._known
            # Of a file or class that could not be collected without TransformerEngine all tests run.
            and (not only or listed & {node.nodeid for node in item.listchain()})
        ]

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        if report.outcome != PASSED:
            message = _skip_reason(report) or _last_lines(report.longreprtext)
            self._judge(report, collector.path, message)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if self.options.collectonly:
            return None
        items = session.items
        work = partial(_run_tests, session)
        with closing(RankPool(self.options.ranks, work, ForkContext())) as pool:
            gc.freeze()  # or else each fork's first collection would copy most of the memory that they share
            for _, numbers in groupby(range(len(items)), key=lambda number: items[number].path):
                for number in numbers:
                    self._run(pool, items[number], number)
                    if session.shouldfail or session.shouldstop:
                        return True
                pool.close()
        return True

    def _run(self, pool: RankPool, item: pytest.Item, number: int) -> None:
        began = time.perf_counter()
        if not pool.ranks:  # the first test of a file, or one after a test that failed
            pool.start()
        for rank in pool.ranks:
            with suppress(BrokenPipeError):
                rank.pipe.send(number)
        outcome = pool.wait(self.options.hang_after)
        for report in self._reports(item, outcome, time.perf_counter() - began):
            item.ihook.pytest_runtest_logreport(report=report)

    def _reports(self, item: pytest.Item, outcome: Outcome, seconds: float) -> list[pytest.TestReport]:
        """Record what became of a test, and return the reports that pytest is to show."""
        of = f" of {self.options.ranks}"
        to_report = partial(self.config.hook.pytest_report_from_serializable, config=self.config)
        reports = [(rank, to_report(data=data)) for rank, data in outcome.sent]
        for rank, report in reports:
            if report.failed:
                message = f"rank {rank}{of}: {getattr(report, 'raised', report.longreprtext)}"
                report.sections.insert(0, ("Rank", f"rank {rank}{of} failed first"))
                self._judge(report, item.path, message, seconds)
                return [report]
        if not outcome.went_well:
            texts = outcome.died or {
                rank: f"was here after {seconds:.0f} s\n{text}" for rank, text in outcome.stacks.items()
            }
            lines = _MESSAGE_LENGTH // 100 // len(texts)
            innermost = (f"rank {rank}{of} {_innermost(text, lines)}" for rank, text in texts.items())
            self._record(item.nodeid, FAILED if outcome.died else HANGS, "", "\n".join(innermost), seconds)
            shown = "\n".join(f"rank {rank}{of} {text}" for rank, text in texts.items())
            keywords = dict.fromkeys(item.keywords, 1)
            return [pytest.TestReport(item.nodeid, item.location, keywords, "failed", shown, "call")]
        # A test passes if it runs on some rank, and fails on none.
        by_rank = {rank: [report for number, report in reports if number == rank] for rank, _ in reports}
        for own in by_rank.values():
            if not any(map(_skip_reason, own)):
                self._record(item.nodeid, PASSED, "", "", seconds)
                return own
        skipped = next(report for report in by_rank[0] if _skip_reason(report))
        self._judge(skipped, item.path, _skip_reason(skipped), seconds)
        return by_rank[0]

    def _judge(self, report: Report, path: Path, message: str, seconds: float = 0.0) -> None:
        """Record a report of a failure or a skip, and make it a skip if the test is not runnable here."""
        reason = reason_of(
            message,
            skipped=report.skipped,
            ranks=self.options.ranks,
            transformer_engine=self.options.transformer_engine,
        )
        outcome = NOT_RUNNABLE if reason else SKIPPED if report.skipped else FAILED
        if report.nodeid not in self._known:
            self._record(report.nodeid, outcome, reason, message, seconds)
        if reason:
            report.outcome = "skipped"
            report.longrepr = (str(path), 0, f"Skipped: not runnable here: {reason}: {message}")

    def _record(self, nodeid: str, outcome: str, reason: str, message: str, seconds: float) -> None:
        for folder in (str(self.config.rootpath), *filter(None, sys.path)):
            message = message.replace(f"{folder}/", "")
        if len(message) > _MESSAGE_LENGTH:
            half = _MESSAGE_LENGTH // 2
            message = f"{message[:half]}\n[...]\n{message[-half:]}"
        result = Result(nodeid, *self._what, outcome, reason, message, round(seconds, 3))
        result.append_to(self.options.results)


def _innermost(stacks: str, lines: int) -> str:
    """Return the first line, and the innermost calls of the thread that runs the test."""
    first, _, rest = stacks.partition("\n")
    _, _, thread = rest.partition("Current thread")
    return "\n".join([first, *thread.splitlines()[1 : lines + 2]])


def _skip_reason(report: Report) -> str:
    if not report.skipped or hasattr(report, "wasxfail"):
        return ""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return text.removeprefix("Skipped: ") or "no reason given"


def _last_lines(text: str) -> str:
    """Return what was raised, which comes last in a traceback, and then the lines before it."""
    *before, raised = text.splitlines()[-4:] or [""]
    return "\n".join([raised.removeprefix("E").strip(), *before])


# --- in the process of a rank


def _run_tests(session: pytest.Session, pipe: Connection, folder: Path) -> None:
    """Run the tests whose numbers come, until the pool is closed."""
    manager = session.config.pluginmanager
    _capture_output_alone(manager.getplugin("capturemanager"))
    manager.unregister(name="terminalreporter")
    manager.unregister(name="megatron-tests-conductor")
    manager.register(_Reports(session.config, pipe))
    _prepare(session, int(os.environ["RANK"]), folder)
    with suppress(EOFError):
        while True:
            _run_test(session, pipe.recv())
            pipe.send(None)


def _prepare(session: pytest.Session, rank: int, folder: Path) -> None:
    """Make the fork of the process that has collected the tests a rank of its own."""
    # Megatron's conftest makes a folder beside that of the rank, which the ranks share.
    base = folder / f"rank{rank}"
    base.mkdir()
    session.config._tmp_path_factory._basetemp = base  # type: ignore[attr-defined]
    # Put right what the tests have read from the variables of rank 0 when they were imported.
    tests = [module for name, module in sys.modules.items() if name.startswith("tests.")]
    for owner, name in product((_utils(), *tests), ("rank", "local_rank")):
        if isinstance(getattr(owner, name, None), int):
            setattr(owner, name, rank)
    _free_groups()
    # Some tests rely on an earlier test for this, since in Megatron's CI a process runs many files.
    _utils().initialize_distributed()


def _capture_output_alone(manager: Any) -> None:
    """Capture the output of this rank in files of its own, as forks share the position in a file.

    The objects ``sys.stdout`` and ``sys.stderr`` stay the same: modules that are imported already hold them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    capturing = manager._global_capturing
    for stream in (capturing.out, capturing.err):
        if hasattr(stream, "targetfd"):
            with tempfile.TemporaryFile() as own:
                os.dup2(own.fileno(), stream.tmpfile.fileno())
            os.dup2(stream.tmpfile.fileno(), stream.targetfd)


def _free_groups() -> None:
    """Make ``Utils.destroy_model_parallel`` destroy the groups that ``initialize_model_parallel`` has made.

    Megatron's tests only forget them, and every group of gloo has threads of its own.
    """
    from torch.distributed import destroy_process_group, distributed_c10d

    tools, groups = _utils(), distributed_c10d._world.pg_map
    initialize, destroy = tools.initialize_model_parallel, tools.destroy_model_parallel
    made: set[Any] = set()

    def initialize_and_note(*args: Any, **kwargs: Any) -> None:
        before = set(groups)
        initialize(*args, **kwargs)
        made.update(set(groups) - before - {distributed_c10d.GroupMember.WORLD})

    def destroy_all() -> None:
        waits_for_all_ranks = tools.inited
        destroy()
        if waits_for_all_ranks:
            for group in made & set(groups):
                destroy_process_group(group)
            made.clear()

    tools.initialize_model_parallel = initialize_and_note
    tools.destroy_model_parallel = destroy_all


def _run_test(session: pytest.Session, number: int) -> None:
    import torch

    # Seeded as a new process seeds a GPU: always alike, unlike the CPU. Without a seed some tests would pass
    # at one time and not at another.
    torch.manual_seed(torch.Generator().initial_seed())
    item, *others = session.items[number:]
    # Megatron's CI passes --experimental, an option of its conftest, for tests with this mark.
    session.config.option.experimental = item.get_closest_marker("experimental") is not None
    is_last = not others or others[0].path != item.path
    session.config.hook.pytest_runtest_protocol(item=item, nextitem=None if is_last else others[0])


class _Reports:
    """Adds to each report of a failure what was raised, and where, in few words; sends all reports."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self.config, self.pipe = config, pipe

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and call.excinfo is not None:
            frames = [_place_of(frame) for frame in reversed(call.excinfo.traceback[-2:])]
            raised = f"{call.excinfo.typename}: {call.excinfo.value}"
            report.raised = "\n".join([raised, *frames])  # type: ignore[attr-defined]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        send(self.pipe, data, report.failed)


def _place_of(frame: TracebackEntry) -> str:
    place = f"at {frame.path}:{frame.lineno + 1}"
    try:
        return f"{place}: {' '.join(str(frame.statement).split())}"
    except AssertionError:  # the source file does not exist
        return place
