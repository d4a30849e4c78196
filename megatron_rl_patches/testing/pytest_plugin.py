"""A plugin of pytest: a marker that runs a test on ranks, and fixtures for tests of training loops.

pytest loads it where this package is installed; it imports neither torch nor Megatron before a test uses it.
Each rank runs pytest for one function, so that asserts, reports and logs are those of pytest. Fixtures run in
the process that starts the ranks, and their values are pickled.
"""

from __future__ import annotations

import inspect
import os
import pickle
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ..errors import InvalidInputError
from .cpu_backend import cpu_backend

_MARKER = "ranks(count, timeout=120, env={}, cpu_backend=True, transformer_engine=False, fresh=False): "
_MARKER += "run the test on so many gloo ranks"
_servers, _longrepr = pytest.StashKey[dict[Any, Any]](), pytest.StashKey[Any]()
#: What ranks have as the process that starts them: options, settings. Its plugins are not loaded again.
_OPTIONS = ("importmode", "tbstyle", "verbose", "showlocals", "fulltrace")
_INI = ("markers", "python_files", "filterwarnings", "consider_namespace_packages", "verbosity_assertions")
_WITHOUT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}
_STACK = r'  File ".*/(_pytest|pluggy|multiprocessing|megatron_rl_patches/testing)/.* in |Extension modules'


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("ranks_preload", "modules that ranks have imported when they start", "args", [])


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    config.stash[_servers] = {}
    # pytest rewrites all asserts of a distribution that has a plugin. Those of this package are no tests.
    rewritten: set[str] = getattr(config.pluginmanager.rewrite_hook, "_must_rewrite", set())
    rewritten -= {"megatron_rl_patches", "_megatron_rl_patches_startup"}
    getattr(config.pluginmanager.rewrite_hook, "_marked_for_rewrite_cache", {}).clear()


def pytest_unconfigure(config: pytest.Config) -> None:
    for server in config.stash.get(_servers, {}).values():
        server.close()


@pytest.fixture(name="cpu_backend")
def _cpu_backend() -> Iterator[None]:
    """Runs the test inside ``cpu_backend()``."""
    with cpu_backend():
        yield


@pytest.fixture
def mock_ddp(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that puts ``MockDDP`` in the place of a class, such as ``"my_rl.set_up.DDP"``."""
    from .mock_ddp import MockDDP

    return lambda target: monkeypatch.setattr(target, MockDDP)


@pytest.fixture
def tiny_model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """The function ``tiny_model``. A test without ranks has a gloo group of one, inside ``cpu_backend()``."""
    from .tiny_models import tiny_model

    if _marked(request.node):
        yield tiny_model
        return
    import torch.distributed as dist

    request.getfixturevalue("cpu_backend")
    from megatron.core import parallel_state

    dist.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield tiny_model
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def ranks(pytestconfig: pytest.Config) -> Callable[..., list[Any]]:
    """The function ``spawn_ranks``, with forks, and with the option ``transformer_engine`` of the marker."""
    from . import ranks

    def run(
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 120.0,
        env: Mapping[str, str] | None = None,
        transformer_engine: bool | str = False,
        **kwargs: Any,
    ) -> list[Any]:
        __tracebackhide__ = True
        call = partial(ranks.call, pickle.dumps((function, args, kwargs)))
        outcome = _fork(pytestconfig, transformer_engine, call, world_size, timeout, env or {})
        return [pickle.loads(result) for result in ranks.results_of(outcome, timeout)]

    return run


# --- in the process that starts the ranks


def _marked(item: pytest.Item) -> dict[str, Any]:
    """Return the options of all marks of a test. Those of marks without a count are for other marks."""
    options: dict[str, Any] = {}
    for mark in reversed([*item.iter_markers("ranks")]):  # the closest is the last
        own = {**mark.kwargs, **dict(zip(["count"], mark.args, strict=False))}
        if not own:
            raise InvalidInputError(f"{item.nodeid} has the marker ranks without a number; write ranks(2)")
        options |= own
    if "count" in options and hasattr(getattr(item, "cls", None), "assertEqual"):
        raise InvalidInputError(f"{item.nodeid} is a method of unittest.TestCase; ranks need a plain class")
    return options if "count" in options else {}


def pytest_runtest_setup(item: pytest.Item) -> None:
    _marked(item)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    options = _marked(pyfuncitem)
    if not options:
        return None
    pyfuncitem.stash[_longrepr] = None
    for name, value in options.items():
        if callable(value):  # a function of arguments of the test
            parameters = inspect.signature(value).parameters
            options[name] = value(*(pyfuncitem.funcargs[parameter] for parameter in parameters))
    try:
        inspect.signature(_run).bind(pyfuncitem, **options)
    except TypeError as error:
        raise InvalidInputError(f"{error}; expected {_MARKER}") from None
    _run(pyfuncitem, **options)
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show where the test was on its rank, in place of this module."""
    report = yield
    if call.when == "call" and call.excinfo and report.longrepr and _longrepr in item.stash:
        report.longrepr = item.stash[_longrepr] or call.excinfo.getrepr(style="value")
    return report


def _run(
    item: pytest.Function,
    count: int,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    cpu_backend: bool = True,
    transformer_engine: bool | str = False,
    fresh: bool = False,
) -> None:
    """Run the body of a test on ranks, and raise what a rank has raised first."""
    from multiprocessing.context import SpawnContext

    from .ranks import RanksFailed, results_of, run_on_ranks

    job = _job(item)
    job.backend = {"transformer_engine": transformer_engine} if cpu_backend else None
    with tempfile.TemporaryDirectory(prefix="output-", ignore_cleanup_errors=True) as folder:
        job.output = "" if item.config.getoption("capture") == "no" else folder
        run = partial(_work, job), count, timeout, {**(env or {}), **_WITHOUT}
        fork = partial(_fork, item.config, transformer_engine)
        outcome = run_on_ranks(*run, SpawnContext()) if fresh else fork(*run)
        for file in sorted(Path(folder).iterdir()):
            if text := file.read_text(errors="replace"):
                item.add_report_section("call", file.name, text)
    sent: dict[int, Any] = {rank: value for rank, value in sorted(outcome.sent) if isinstance(value, _Result)}
    for rank, result in sent.items():
        for title, text in result.report.sections:  # "Captured log call"
            item.add_report_section("call", f"{title.split()[1]} on rank {rank}", text)
    skipped = [rank for rank, result in sent.items() if result.report.skipped and outcome.went_well]
    first, *others = outcome.failed or skipped or [-1]
    if first in sent:
        item.stash[_longrepr] = longrepr = sent[first].report.longrepr
        if hasattr(longrepr, "addsection"):
            longrepr.addsection(f"rank {first} of {count} failed first", "")
            for rank in others:
                text = str(sent.get(rank) or outcome.died.get(rank))
                longrepr.addsection(f"rank {rank}", "the same" if text == str(sent[first]) else text)
        raise sent[first].raised()
    try:
        results_of(outcome, timeout)
    except RanksFailed as error:
        lines = [line for line in str(error).splitlines() if not re.match(_STACK, line)]
        raise RanksFailed("\n".join(lines), error.ranks) from None


def _fork(config: pytest.Config, transformer_engine: bool | str, *run: Any) -> Any:
    """Return the outcome of forks of a process that has imported what a new interpreter would import now."""
    from .ranks import ForkServer

    *_, env = run
    modules = [*config.getini("ranks_preload"), "megatron_rl_patches.testing.tiny_layers", "torch._dynamo"]
    specs = map(PathFinder.find_spec, sorted({"megatron", *(name.partition(".")[0] for name in modules)}))
    places = [(spec.origin, *(spec.submodule_search_locations or ())) for spec in specs if spec]
    modules += [name for name in sys.modules if name.startswith("_pytest.")]
    variables = [(name, x) for name, x in {**os.environ, **env}.items() if not name.startswith("PYTEST_")]
    key = transformer_engine, *places, *sorted(variables)
    servers = config.stash[_servers]
    servers[key] = server = servers.pop(key, None) or ForkServer(modules, transformer_engine, env)
    for old in [*servers][:-3]:  # the latest is the last, and each has some hundred MB
        servers.pop(old).close()
    try:
        return server.run(*run)
    except BaseException:
        servers.pop(key).close()
        raise


def _job(item: pytest.Function) -> SimpleNamespace:
    """Return what the pytest of a rank needs to know of the test and of the settings here."""
    config = item.config
    command = [str(item.path), f"-c{os.devnull}", f"--rootdir={config.rootpath}", "--noconftest", "-s"]
    command += [f"-pno:{name}" for name in ("terminal", "faulthandler", "cacheprovider")]
    command += [f"-W{text}" for text in config.getoption("pythonwarnings") or ()]
    for name in _INI:
        with suppress(ValueError):  # a release of pytest does not have the setting
            value = config.getini(name)
            command.append(f"-o{name}=" + ("\n".join(value) if isinstance(value, list) else str(value)))
    classes = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    names = inspect.signature(item.obj).parameters.keys() & item.funcargs.keys()
    return SimpleNamespace(
        command=command,
        options={name: config.getoption(name) for name in _OPTIONS},
        rewritten={item.module.__name__, *getattr(config.pluginmanager.rewrite_hook, "_must_rewrite", ())},
        place=(item.path, classes, item.originalname),
        filters=[mark.args for mark in item.iter_markers("filterwarnings")],
        values={name: _pickled(name, item.funcargs[name]) for name in names},
        attributes=_pickled("self", vars(item.instance) if classes else {}),
    )


def _pickled(name: str, value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        hint = "fixtures and parameters must be picklable; make other values in the body of the test"
        raise InvalidInputError(f"{name!r} cannot be sent to ranks: {error}; {hint}") from None


# --- on ranks


@dataclass(frozen=True)
class _Result:
    """What a rank sends: pytest's report, and what was raised."""

    report: pytest.TestReport
    error: bytes

    def __str__(self) -> str:
        return self.report.longreprtext

    def raised(self) -> Any:
        with suppress(Exception):  # not everything can be pickled
            return pickle.loads(self.error)
        return (pytest.skip if self.report.skipped else pytest.fail).Exception(str(self))


def _work(job: SimpleNamespace, start: Callable[[], None]) -> _Result:
    """Run pytest on a rank for one test. What it has printed is in files, also if the rank dies."""
    from .ranks import FailedOnRank

    for descriptor, stream in enumerate([sys.stdout, sys.stderr] if job.output else [], 1):
        path = f"{job.output}/{stream.name.strip('<>')} on rank {os.environ['RANK']}"
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), descriptor)
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with nullcontext() if job.backend is None else cpu_backend(**job.backend):
        pytest.main(job.command, plugins=[on_rank := _OnRank(job, start)])
    if on_rank.result is None or on_rank.result.report.failed:
        raise FailedOnRank(on_rank.result or on_rank.failure)
    return on_rank.result


class _OnRank:
    """A plugin of the pytest on a rank: it makes one test without fixtures, and takes its report."""

    def __init__(self, job: SimpleNamespace, start: Callable[[], None]) -> None:
        self.job, self.start = job, start
        self.result: _Result | None = None
        self.failure = "pytest did not run the test: its messages are on stderr"

    def pytest_configure(self, config: pytest.Config) -> None:
        vars(config.option).update(self.job.options)
        # Some releases highlight asserts by the writer of the terminal.
        writer = SimpleNamespace(_highlight=lambda source, *lexer, **options: source)
        config.pluginmanager.register(type("Reporter", (), {"_tw": writer})(), "terminalreporter")

    def pytest_collection(self, session: pytest.Session) -> bool:
        session.items = []
        try:
            pytest.register_assert_rewrite(*self.job.rewritten - sys.modules.keys())
            item = self._item(session)
            self.start()
            session.items.append(item)
        except BaseException:
            self.failure = traceback.format_exc()
        return True

    def _item(self, session: pytest.Session) -> pytest.Function:
        path, classes, name = self.job.place
        parent: Any = pytest.Module.from_parent(session, path=path)
        for of_class in classes:
            parent = pytest.Class.from_parent(parent, name=of_class)
        item: pytest.Function = pytest.Function.from_parent(parent, name=name)  # imports the module
        for node in item.listchain():  # the process that starts the ranks has judged the marks
            node.own_markers.clear()
        for filters in self.job.filters:
            item.add_marker(pytest.mark.filterwarnings(*filters))
        item.fixturenames.clear()
        item.funcargs.update({name: pickle.loads(value) for name, value in self.job.values.items()})
        vars(item.instance or SimpleNamespace()).update(pickle.loads(self.job.attributes))
        return item

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        print(warning_message.category.__name__, warning_message.message, sep=": ", file=sys.stderr)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "call" or (call.excinfo and self.result is None):
            error = b""
            with suppress(Exception):
                error = pickle.dumps(call.excinfo and call.excinfo.value)
            self.result = _Result(report, error)
        return report
