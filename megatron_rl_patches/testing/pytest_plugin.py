"""A plugin of pytest: a marker that runs a test on ranks, and fixtures for tests of training loops.

pytest loads it where this package is installed; it imports neither torch nor Megatron before a test uses it.
Ranks are forks of a process that runs pytest, so that asserts, reports and logs are those of pytest. Fixtures
run in the process of the user's pytest, and their values are pickled.
"""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from ..errors import InvalidInputError, MegatronRLPatchesError
from .cpu_backend import cpu_backend
from .rank_pool import RankPool
from .ranks import RanksFailed, call, results_of, run_on_ranks

_MARKER = "ranks(count, timeout=120, env={}, cpu_backend=True, transformer_engine=False, fresh=False): "
_MARKER += "run the test on so many gloo ranks"
_servers, _longrepr = pytest.StashKey[dict[Any, RankPool]](), pytest.StashKey[Any]()
#: What ranks have as the process that starts them: options, settings. Its plugins are not loaded again.
_OPTIONS = ("importmode", "tbstyle", "verbose", "showlocals", "fulltrace")
_INI = ("markers", "python_files", "filterwarnings", "consider_namespace_packages", "verbosity_assertions")
_WITHOUT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}
_MODULES = ("megatron_rl_patches.testing.tiny_layers", "torch._dynamo")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("ranks_preload", "modules that ranks have imported when they start", "args", [])


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    config.stash[_servers] = {}
    # pytest rewrites all asserts of a distribution that has a plugin. Those of this package are no tests.
    rewritten: set[str] = getattr(config.pluginmanager.rewrite_hook, "_must_rewrite", set())
    rewritten -= {"megatron_rl_patches", "_megatron_rl_patches_startup"}


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
        work = partial(call, pickle.dumps((function, args, kwargs)))
        outcome = _fork(pytestconfig, transformer_engine, False, work, world_size, timeout, env or {})
        return [pickle.loads(result) for result in results_of(outcome, timeout)]

    return run


# --- in the process of the user's pytest


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


pytest_runtest_setup = _marked  # which refuses marks before fixtures run


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
    job = _job(item)
    job.backend = {"transformer_engine": transformer_engine} if cpu_backend else None
    with tempfile.TemporaryDirectory(prefix="output-", ignore_cleanup_errors=True) as folder:
        job.output = "" if item.config.getoption("capture") == "no" else folder
        outcome = _fork(item.config, transformer_engine, fresh, job, count, timeout, env or {})
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
            then = f", then {', '.join(map(str, others))}" if others else ""
            longrepr.addsection(f"rank {first} of {count} failed first{then}", "")
        raise sent[first].raised()
    results_of(outcome, timeout)


def _fork(config: pytest.Config, transformer_engine: bool | str, fresh: bool, *run: Any) -> Any:
    """Call ``run_on_ranks`` in a process that has the variables and the path of this one.

    It is kept for the next tests, unless ``fresh``: such a process has imported no more than this plugin.
    """
    *_, env = run
    variables = [(name, x) for name, x in {**os.environ, **env}.items() if not name.startswith("PYTEST_")]
    key = transformer_engine, fresh and object(), *sys.path, *sorted(variables)
    servers = config.stash[_servers]
    if (server := servers.pop(key, None)) is None:
        modules = [] if fresh else [*config.getini("ranks_preload"), *_MODULES]
        work = _OnRank(config, modules, transformer_engine).serve
        server = RankPool(1, work, SpawnContext(), {"OMP_NUM_THREADS": "1", **env, **_WITHOUT})
        config.add_cleanup(server.close)
        server.start()
    servers[key] = server
    for old in [*servers][:-3]:  # the latest is the last, and each has some hundred MB
        servers.pop(old).close()
    pipe = server.ranks[0].pipe
    try:
        pipe.send((os.getcwd(), run))
        return pipe.recv()
    except BaseException as error:
        servers.pop(key).close()
        if isinstance(error, EOFError | OSError):
            raise RanksFailed("the process that forks ranks has died; its messages are on stderr") from error
        raise


def _job(item: pytest.Function) -> SimpleNamespace:
    """Return what a rank needs to know of the test."""
    classes = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    names = inspect.signature(item.obj).parameters.keys() & item.funcargs.keys()
    hook = item.config.pluginmanager.rewrite_hook
    return SimpleNamespace(
        rewritten={item.module.__name__, *getattr(hook, "_must_rewrite", ())},
        place=(item.path, classes, item.originalname),
        filters=[*item.iter_markers("filterwarnings")],
        values={name: _pickled(name, item.funcargs[name]) for name in names},
        attributes=_pickled("self", vars(item.instance) if classes else {}),
    )


def _pickled(name: str, value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        hint = "fixtures and parameters must be picklable; make other values in the body of the test"
        raise InvalidInputError(f"{name!r} cannot be sent to ranks: {error}; {hint}") from None


# --- in the process that forks ranks, and on ranks


class _Result(NamedTuple):
    """What a rank sends: pytest's report, what was raised, and whether the test has failed."""

    report: pytest.TestReport
    error: bytes
    is_failure: bool

    def __str__(self) -> str:
        return self.report.longreprtext

    def raised(self) -> Any:
        with suppress(Exception):  # not everything can be pickled
            return pickle.loads(self.error)
        return (pytest.skip if self.report.skipped else pytest.fail).Exception(str(self))


class _OnRank:
    """A plugin of a pytest that collects nothing: its process forks ranks, which run one test each."""

    result: _Result | None = None

    def __init__(self, config: pytest.Config, modules: list[str], transformer_engine: bool | str) -> None:
        self.modules, self.transformer_engine = modules, transformer_engine
        self.options = {name: config.getoption(name) for name in _OPTIONS}
        self.command = [f"-c{os.devnull}", f"--rootdir={config.rootpath}", "--noconftest", "-s"]
        self.command += [f"-pno:{name}" for name in ("terminal", "faulthandler", "cacheprovider")]
        self.command += [f"-W{text}" for text in config.getoption("pythonwarnings") or ()]
        for name in _INI:
            with suppress(ValueError):  # a release of pytest does not have the setting
                value = config.getini(name)
                text = "\n".join(value) if isinstance(value, list) else str(value)
                self.command.append(f"-o{name}={text}")

    def serve(self, pipe: Connection, folder: Path) -> None:
        self.pipe, self.folder, self.filters = pipe, folder, [*warnings.filters]
        pytest.main(self.command, plugins=[self])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Import modules, and fork ranks for each test, until the user's pytest ends."""
        vars(session.config.option).update(self.options)
        # Some releases highlight asserts by the writer of the terminal.
        writer = SimpleNamespace(_highlight=lambda source, *lexer, **options: source)
        session.config.pluginmanager.register(type("Reporter", (), {"_tw": writer})(), "terminalreporter")
        layers = self.transformer_engine
        with warnings.catch_warnings(), suppress(MegatronRLPatchesError):  # ranks raise it, too
            warnings.simplefilter("ignore")  # of what is not installed
            with cpu_backend(transformer_engine=layers) if layers else nullcontext():
                for name in self.modules:
                    with suppress(ImportError):
                        import_module(name)
        if sys.dont_write_bytecode:  # or else each rank would rewrite the asserts of its test again
            sys.dont_write_bytecode, sys.pycache_prefix = False, str(self.folder)
        warnings.filters[:] = self.filters  # type: ignore[index]  # pytest sets its own around each test
        gc.freeze()  # what is imported is no garbage: collections in forks take a fraction of the time
        with suppress(EOFError):
            while True:
                directory, (work, size, timeout, env) = self.pipe.recv()
                os.chdir(directory)
                work = partial(self._run, session, work) if isinstance(work, SimpleNamespace) else work
                self.pipe.send(run_on_ranks(work, size, timeout, env, ForkContext()))
        os._exit(0)

    def _run(self, session: pytest.Session, job: SimpleNamespace, start: Callable[[], None]) -> Any:
        """Run a test. What it prints is in files, also if the rank dies."""
        for descriptor, stream in enumerate([sys.stdout, sys.stderr] if job.output else [], 1):
            file = f"{job.output}/{stream.name.strip('<>')} on rank {os.environ['RANK']}"
            os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), descriptor)
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        with nullcontext() if job.backend is None else cpu_backend(**job.backend):
            pytest.register_assert_rewrite(*job.rewritten - sys.modules.keys())
            path, classes, name = job.place
            parent: Any = pytest.Module.from_parent(session, path=path)
            for of_class in classes:
                parent = pytest.Class.from_parent(parent, name=of_class)
            info = SimpleNamespace(argnames=job.values, names_closure=[], name2fixturedefs={})
            item: Any = pytest.Function.from_parent(parent, name=name, fixtureinfo=info)  # imports the module
            for node in item.listchain():  # the user's pytest has judged the marks
                node.own_markers.clear()
            item.own_markers += job.filters
            item.funcargs.update({name: pickle.loads(value) for name, value in job.values.items()})
            vars(item.instance or SimpleNamespace()).update(pickle.loads(job.attributes))
            start()
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return self.result

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
            self.result = _Result(report, error, report.failed)
        return report
