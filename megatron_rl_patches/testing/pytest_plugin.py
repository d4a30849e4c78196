"""A plugin of pytest: a marker that runs a test on ranks, and fixtures for tests of training loops.

pytest loads it wherever this package is installed, unless ``-p no:megatron_rl_patches`` is set. Neither torch
nor Megatron is imported before a test uses it.

Each rank runs pytest for one function, so that asserts, reports and logs are those of pytest. Fixtures run in
the process that starts the ranks, and their values are pickled.
"""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ..errors import InvalidInputError
from .cpu_backend import cpu_backend

if TYPE_CHECKING:
    from .mock_ddp import MockDDP
    from .rank_pool import Outcome
    from .tiny_models import TinyModel

_MARKER = (
    "ranks(count, *, timeout=120, env={}, cpu_backend=True, transformer_engine=False, fresh=False, **sizes): "
    "run the body of the test on so many gloo ranks, each a process of its own"
)
_servers, _longrepr = pytest.StashKey[dict[Any, Any]](), pytest.StashKey[Any]()
_MOST_SERVERS = 3
#: Lines of stacks that say nothing of the test.
_STACK = r'^  File ".*/(_pytest|pluggy|multiprocessing|megatron_rl_patches/testing)/.* in |^Extension modules'
#: What pytest does without on ranks, and the settings that it has from the process that starts them.
_WITHOUT = ("faulthandler", "cacheprovider")
_OPTIONS = {"importmode": "--import-mode", "tbstyle": "--tb", "assertmode": "--assert"}
_INI = ("python_files", "filterwarnings", "consider_namespace_packages", "log_level", "verbosity_assertions")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("ranks_preload", "modules that ranks have imported when they start", "args", [])


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    config.stash[_servers] = {}


def pytest_unconfigure(config: pytest.Config) -> None:
    for server in config.stash.get(_servers, {}).values():
        server.close()


@pytest.fixture(name="cpu_backend")
def _cpu_backend() -> Iterator[None]:
    """Runs the test inside ``cpu_backend()``: unmodified Megatron, on the CPU."""
    with cpu_backend():
        yield


@pytest.fixture
def mock_ddp(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that puts ``MockDDP`` in the place of classes, ``"my_rl.set_up.DDP"``, and returns it."""
    from .mock_ddp import MockDDP

    def put(*targets: str) -> type[MockDDP]:
        for target in targets:
            monkeypatch.setattr(target, MockDDP)
        return MockDDP

    return put


@pytest.fixture
def tiny_model(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """The function ``tiny_model``. A test without ranks has a gloo group of one, inside ``cpu_backend()``."""
    from .tiny_models import tiny_model

    if request.node.get_closest_marker("ranks"):
        yield tiny_model
        return
    import torch.distributed as dist

    request.getfixturevalue("cpu_backend")
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield tiny_model
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """The function ``ranks(function, count, *arguments, **options)``, with the options of the marker.

    It calls a function on ranks, and returns what each returned; ``RanksFailed`` has the tracebacks.
    """

    def run(function: Callable[..., Any], count: int, *arguments: Any, **options: Any) -> list[Any]:
        call = _pickled("the call", (function, arguments))
        return [pickle.loads(result.value) for result in _run(request.node, call, count, **options)]

    return run


# --- in the process that starts the ranks


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("ranks") and hasattr(getattr(item, "cls", None), "assertEqual"):
        raise InvalidInputError("ranks cannot run a method of unittest.TestCase; make it a test of a plain class")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    options: dict[str, Any] = {}
    for mark in reversed([*pyfuncitem.iter_markers("ranks")]):  # the closest is the last
        options |= {**mark.kwargs, **dict(zip(["count"], mark.args, strict=False))}
    if not options:
        return None
    for name, value in options.items():
        if callable(value):  # a function of arguments of the test
            parameters = inspect.signature(value).parameters
            options[name] = value(*(pyfuncitem.funcargs[parameter] for parameter in parameters))
    for result in _run(pyfuncitem, None, **options):
        if result.report.skipped:
            pyfuncitem.stash[_longrepr] = result.report.longrepr
            raise _loaded(result.error) or pytest.skip.Exception(result.report.longrepr[2])
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show where the test was on its rank, in place of this module."""
    report = yield
    if call.when == "call" and call.excinfo and report.longrepr and item.get_closest_marker("ranks"):
        report.longrepr = item.stash.get(_longrepr, None) or call.excinfo.getrepr(style="value")
    return report


def _run(
    item: pytest.Function,
    call: bytes | None,
    count: int,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    cpu_backend: bool = True,
    transformer_engine: bool | str = False,
    fresh: bool = False,
    **sizes: Any,
) -> list[_Result]:
    """Run the test, or a pickled call in its place, on ranks. What a rank has raised first is raised here."""
    from multiprocessing.context import SpawnContext

    from .ranks import RanksFailed, results_of, run_on_ranks
    from .tiny_models import TinyModel

    config, model = item.config, TinyModel(**sizes) if sizes else None
    with tempfile.TemporaryDirectory(prefix="output-", ignore_cleanup_errors=True) as folder:
        output = "" if config.getoption("capture") == "no" else folder
        backend = {"transformer_engine": transformer_engine} if cpu_backend else None
        work = partial(_work_on_this_rank, _Job.of(item, call, output), backend, model)
        if fresh or isinstance(transformer_engine, str):
            outcome = run_on_ranks(work, count, timeout, env or {}, SpawnContext())
        else:
            outcome = _fork(config, transformer_engine, work, count, timeout, env or {})
        for file in sorted(Path(folder).iterdir()):
            if text := file.read_text(errors="replace"):
                item.add_report_section("call", file.name, text)
    sent = {rank: value for rank, value in sorted(outcome.sent) if isinstance(value, _Result)}
    for rank, result in sent.items():
        for title, text in result.report.sections:  # "Captured log call"
            item.add_report_section("call", f"{title.split()[1]} on rank {rank}", text)
    try:
        results: list[_Result] = results_of(outcome, timeout)
        return results
    except RanksFailed as error:
        first, *others = error.ranks or (None,)
        if call is not None or first not in sent:
            lines = [line for line in str(error).splitlines() if not re.match(_STACK, line)]
            raise RanksFailed("\n".join(lines), error.ranks) from None
        item.stash[_longrepr] = longrepr = sent[first].report.longrepr
        if hasattr(longrepr, "addsection"):
            longrepr.addsection(f"rank {first} of {count} failed first", "")
            for rank in others:
                text = str(sent.get(rank) or outcome.died.get(rank))
                longrepr.addsection(f"rank {rank}", "the same" if text == str(sent[first]) else text)
        raise _loaded(sent[first].error) or error from None


def _loaded(error: bytes) -> BaseException | None:
    """Return an exception of a rank, unless it cannot be pickled."""
    with suppress(Exception):
        return pickle.loads(error)
    return None


def _fork(config: pytest.Config, transformer_engine: bool, *run: Any) -> Outcome:
    """Run on forks of a process that has imported what a new interpreter would import now."""
    from .ranks import ForkServer

    *_, env = run
    modules = ["megatron_rl_patches.testing.tiny_layers", "torch._dynamo", *config.getini("ranks_preload")]
    variables = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    specs = [PathFinder.find_spec(name.partition(".")[0]) for name in ["megatron.core", *modules]]
    places = [(spec.origin, *(spec.submodule_search_locations or ())) for spec in specs if spec]
    key = transformer_engine, *places, *sorted({**variables, **env}.items())
    servers = config.stash[_servers]
    server = servers.pop(key, None) or ForkServer(modules, transformer_engine, env)
    servers[key] = server  # the latest is the last
    for old in [*servers][:-_MOST_SERVERS]:
        servers.pop(old).close()
    try:
        return server.run(*run)
    except BaseException:
        servers.pop(key).close()
        raise


def _pickled(name: str, value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise InvalidInputError(
            f"{name!r} cannot be sent to ranks: {error}. Values of fixtures and parameters must be picklable; "
            "make others in the body of the test."
        ) from None


# --- on ranks


@dataclass(frozen=True)
class _Result:
    """What a rank sends: pytest's report, what was raised, and what a call has returned."""

    report: pytest.TestReport
    error: bytes
    value: bytes

    def __str__(self) -> str:
        return self.report.longreprtext


@dataclass(frozen=True)
class _Job:
    """What the pytest of a rank needs to know. Values are those of fixtures, or of attributes of the instance."""

    command: list[str]
    rewritten: list[str]
    path: Path
    classes: list[str]
    name: str
    call: bytes | None
    values: dict[str, bytes]
    attributes: dict[str, bytes]
    output: str

    @classmethod
    def of(cls, item: pytest.Function, call: bytes | None, output: str) -> _Job:
        config = item.config
        command = ["-c", os.devnull, f"--rootdir={config.rootpath}", "--noconftest", "--capture=no"]
        command += [f"{flag}={config.getoption(name)}" for name, flag in _OPTIONS.items()]
        command += [f"-W{text}" for text in config.getoption("pythonwarnings") or ()]
        command += ["-v"] * config.getoption("verbose") + ["-l"] * config.getoption("showlocals")
        command += [f"-pno:{name}" for name in _WITHOUT]
        for name in _INI:
            if value := config.getini(name):
                command.append(f"-o{name}=" + ("\n".join(value) if isinstance(value, list) else str(value)))
        rewritten = [item.module.__name__, *config.pluginmanager.rewrite_hook._must_rewrite]  # type: ignore[attr-defined]
        classes = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
        names = inspect.signature(item.obj).parameters.keys() & item.funcargs.keys() if call is None else ()
        values = {name: _pickled(name, item.funcargs[name]) for name in names}
        attributes = vars(item.instance) if classes else {}
        attributes = {name: _pickled(f"self.{name}", value) for name, value in attributes.items()}
        return cls(command, rewritten, item.path, classes, item.originalname, call, values, attributes, output)


def _work_on_this_rank(
    job: _Job, backend: dict[str, Any] | None, model: TinyModel | None, start: Callable[[], None]
) -> _Result:
    from .ranks import FailedOnRank

    if job.output:
        for descriptor, stream in (1, sys.stdout), (2, sys.stderr):
            name = f"{stream.name.strip('<>')} on rank {os.environ['RANK']}"
            os.dup2(os.open(Path(job.output, name), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), descriptor)
            stream.reconfigure(line_buffering=True)  # or what it has printed would be lost if it dies
    with nullcontext() if backend is None else cpu_backend(**backend):
        pytest.main([*job.command, str(job.path)], plugins=[on_rank := _OnRank(job, model, start)])
    if on_rank.result is None:
        raise FailedOnRank(on_rank.failure or "pytest did not run the test: its messages are on stderr")
    if on_rank.result.report.failed:
        raise FailedOnRank(on_rank.result)
    return on_rank.result


class _OnRank:
    """A plugin of the pytest that runs on a rank: it makes one test without fixtures, and takes its report."""

    def __init__(self, job: _Job, model: TinyModel | None, start: Callable[[], None]) -> None:
        self.job, self.model, self.start = job, model, start
        self.result: _Result | None = None
        self.value, self.failure = b"", ""
        self.variables = dict(os.environ)
        # What plugins do they have done in the process that starts the ranks.
        os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        config.pluginmanager.unregister(name="terminalreporter")

    def pytest_collection(self, session: pytest.Session) -> bool:
        os.environ.clear()
        os.environ.update(self.variables)
        session.items = []
        try:
            pytest.register_assert_rewrite(*{*self.job.rewritten} - sys.modules.keys())
            item = self.item(session)
            self.start()
            if self.model is not None:
                self.model.initialize()
            session.items.append(item)
        except BaseException:
            self.failure = traceback.format_exc()
        gc.freeze()  # what is imported is no garbage: collections take a fraction of the time
        return True

    def item(self, session: pytest.Session) -> pytest.Function:
        """Import the module of the test, and return the test."""
        job, parent = self.job, pytest.Module.from_parent(session, path=self.job.path)
        for name in job.classes:
            parent = pytest.Class.from_parent(parent, name=name)
        parent.obj  # noqa: B018 # first: values may be of classes of the module
        function = {}
        if job.call is not None:
            called, arguments = pickle.loads(job.call)
            function = {"callobj": partial(called, *arguments)}
        item: pytest.Function = pytest.Function.from_parent(parent, name=job.name, **function)
        for node in item.listchain():  # the process that starts the ranks has judged the others
            node.own_markers[:] = [mark for mark in node.own_markers if mark.name == "filterwarnings"]
        item.fixturenames.clear()
        item.funcargs.update({name: pickle.loads(value) for name, value in job.values.items()})
        for name, value in job.attributes.items():
            setattr(item.instance, name, pickle.loads(value))
        return item

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        if self.job.call is None:
            return None
        self.value = pickle.dumps(pyfuncitem.obj())
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "call" or (call.excinfo and self.result is None):
            error = b""
            with suppress(Exception):
                error = pickle.dumps(call.excinfo and call.excinfo.value)
            self.result = _Result(report, error, self.value)
        return report
