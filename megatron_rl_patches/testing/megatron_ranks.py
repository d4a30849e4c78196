"""What happens in the process of a rank that runs tests of Megatron-LM's; see ``megatron_tests``."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from _pytest._code import TracebackEntry

from .rank_pool import Send


def prepare(session: pytest.Session, rank: int, folder: Path) -> None:
    """Make the fork of the process that has collected the tests a rank of its own."""
    manager = session.config.pluginmanager
    _capture_output_alone(manager.getplugin("capturemanager"))
    manager.unregister(name="terminalreporter")
    manager.unregister(name="megatron-tests-conductor")
    manager.register(_Reports(session.config), "megatron-tests-reports")
    # Megatron's conftest makes a folder beside that of the rank, which the ranks share.
    base = folder / f"rank{rank}"
    base.mkdir()
    session.config._tmp_path_factory._basetemp = base  # type: ignore[attr-defined]
    _correct_rank_numbers(rank)
    _free_groups()
    # Some tests rely on an earlier test for this, since in Megatron's CI a process runs many files.
    utils().initialize_distributed()


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


def do_nothing(*args: object, **kwargs: object) -> None:
    pass


def utils() -> Any:
    """Return Megatron's class that initializes and destroys process groups for its tests."""
    try:
        return import_module("tests.unit_tests.test_utilities").Utils
    except (ImportError, AttributeError):
        names = ("initialize_distributed", "initialize_model_parallel", "destroy_model_parallel")
        return SimpleNamespace(inited=False, **dict.fromkeys(names, do_nothing))


def _correct_rank_numbers(rank: int) -> None:
    """Put right what the tests have read from the variables of rank 0 when they were imported."""
    tests = [module for name, module in sys.modules.items() if name.startswith("tests.")]
    for owner in (utils(), *tests):
        for name in ("rank", "local_rank"):
            if isinstance(getattr(owner, name, None), int):
                setattr(owner, name, rank)


def _free_groups() -> None:
    """Make ``Utils.destroy_model_parallel`` destroy the groups that ``initialize_model_parallel`` has made.

    Megatron's tests only forget them, and every group of gloo has threads of its own.
    """
    from torch.distributed import destroy_process_group, distributed_c10d

    tools, groups = utils(), distributed_c10d._world.pg_map
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


def run_test(session: pytest.Session, test: tuple[int, int | None], send: Send) -> None:
    number, follower = test
    _seed()
    item = session.items[number]
    # Megatron's CI passes --experimental, an option of its conftest, for tests with this mark.
    session.config.option.experimental = item.get_closest_marker("experimental") is not None
    session.config.pluginmanager.getplugin("megatron-tests-reports").send = send
    following = None if follower is None else session.items[follower]
    session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


def _seed() -> None:
    """Seed torch as a new process seeds a GPU: always alike, unlike the CPU.

    Without a seed some tests would pass at one time and not at another.
    """
    import torch

    torch.manual_seed(torch.Generator().initial_seed())


class _Reports:
    """Adds to each report of a failure what was raised, and where, in few words; sends all reports."""

    send: Send

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

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
        self.send(data, report.failed)


def _place_of(frame: TracebackEntry) -> str:
    place = f"at {frame.path}:{frame.lineno + 1}"
    try:
        return f"{place}: {' '.join(str(frame.statement).split())}"
    except AssertionError:  # the source file does not exist
        return place


# --- fixtures of Megatron-LM's conftest, for where that cannot be imported for want of a package


@pytest.fixture(autouse=True)
def reset_env_vars() -> Iterator[None]:
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def experimental(request: pytest.FixtureRequest) -> None:
    from megatron.core import config

    config.ENABLE_EXPERIMENTAL = request.config.option.experimental


@pytest.fixture(scope="session")
def tmp_path_dist_ckpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that the ranks share; it goes away with them."""
    folder = tmp_path_factory.getbasetemp().parent / "tmp_dist_ckpt"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="class")
def tmp_dir_per_class(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")
