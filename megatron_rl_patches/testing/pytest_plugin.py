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
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
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
from .ranks import RanksFailed, call, check_arguments, results_of, run_on_ranks

_MARKER = "ranks(count, timeout=120, env={}, cpu_backend=True, transformer_engine=False, fresh=False): "
_MARKER += "run the test on so many gloo ranks"
_servers = pytest.StashKey[dict[Any, RankPool]]()
#: What ranks have as the process that starts them: options, settings. Its plugins are not loaded again.
_OPTIONS = ("capture", "importmode", "tbstyle", "verbose", "showlocals", "fulltrace")
_INI = ["markers", "python_files", "filterwarnings", "consider_namespace_packages", "verbosity_assertions"]
_INI += ["log_level", "log_format", "log_date_format"]
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
        outcome, _ = _fork(pytestconfig, transformer_engine, False, work, world_size, timeout, env or {})
        return [pickle.loads(result) for result in results_of(outcome, timeout)]

    return run


# --- in the process of the user's pytest


def _marked(item: Any) -> dict[str, Any]:
    """Return the options of all marks of a test. Those of marks without a count are for other marks."""
    options: dict[str, Any] = {}
    for mark in reversed([*item.iter_markers("ranks")]):  # the closest is the last
        try:
            own = inspect.signature(partial(_run, item)).bind_partial(*mark.args, **mark.kwargs).arguments
        except TypeError as error:
            raise InvalidInputError(f"{error}; expected {_MARKER}") from None
        if not own:
            raise InvalidInputError(f"{item.nodeid} has the marker ranks without a number; write ranks(2)")
        options |= own
    if "count" in options and hasattr(getattr(item, "cls", None), "assertEqual"):
        raise InvalidInputError(f"{item.nodeid} is a method of unittest.TestCase; ranks need a plain class")
    return options if "count" in options else {}


pytest_runtest_setup = _marked  # which refuses marks before fixtures run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not (options := _marked(pyfuncitem)):
        return None
    # What is raised here has been raised on ranks, or names what is wrong: the report needs no frames of it.
    pyfuncitem.repr_failure = lambda excinfo: excinfo.getrepr(style="value")  # type: ignore[method-assign]
    for name, value in options.items():
        if callable(value):  # a function of arguments of the test
            parameters = inspect.signature(value).parameters
            if unknown := parameters.keys() - pyfuncitem.funcargs.keys():
                raise InvalidInputError(f"{name} of ranks needs an argument {min(unknown)!r} of the test")
            options[name] = value(*(pyfuncitem.funcargs[parameter] for parameter in parameters))
    _run(pyfuncitem, **options)
    return True


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
    if transformer_engine and not cpu_backend:
        raise InvalidInputError("transformer_engine needs the CPU backend; leave out cpu_backend=False")
    classes = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    hook = item.config.pluginmanager.rewrite_hook
    job = SimpleNamespace(
        backend={"transformer_engine": transformer_engine} if cpu_backend else None,
        rewritten={item.module.__name__, *getattr(hook, "_must_rewrite", ())},
        place=(item.path, classes, item.originalname),
        filters=[*item.iter_markers("filterwarnings")],
        values={name: _pickled(repr(name), item.funcargs[name]) for name in item._fixtureinfo.argnames},
        attributes=_pickled("an attribute of self", vars(item.instance) if classes else {}),
    )
    outcome, output = _fork(item.config, transformer_engine, fresh, job, count, timeout, env or {})
    for title, text in output.items():
        item.add_report_section("call", title, text)
    sent: dict[int, Any] = {rank: value for rank, value in sorted(outcome.sent) if isinstance(value, _Result)}
    for rank, result in sent.items():
        for title, text in result.report.sections:  # "Captured log call"
            item.add_report_section("call", f"{title.split()[1]} on rank {rank}", text)
    skipped = [rank for rank, result in sent.items() if result.report.skipped and outcome.went_well]
    first = (outcome.failed or skipped or [-1])[0]
    if first in sent:
        longrepr = sent[first].report.longrepr
        item.repr_failure = lambda excinfo: longrepr  # type: ignore[method-assign]
        if hasattr(longrepr, "addsection"):
            longrepr.addsection(f"ranks {outcome.failed} of {count} failed, in this order", "")
            texts = {rank: str(sent[rank]) for rank in outcome.failed[1:] if rank in sent}
            for rank, text in (texts | outcome.died | outcome.stacks).items():
                longrepr.addsection(f"rank {rank}", text)
        raise sent[first].raised()
    results_of(outcome, timeout)


def _fork(config: pytest.Config, transformer_engine: bool | str, fresh: bool, *run: Any) -> Any:
    """Call ``run_on_ranks`` in a process that is like this one; if ``fresh``, it has imported nothing."""
    _, count, timeout, env = run
    check_arguments(count, timeout, env)
    variables = [(name, x) for name, x in {**os.environ, **env}.items() if not name.startswith("PYTEST_")]
    key = transformer_engine, fresh and object(), *sys.path, *sorted(variables)
    servers, request = config.stash[_servers], (os.getcwd(), run)
    if (server := servers.pop(key, None)) is None:  # another thread may use it now
        modules = [] if fresh else [*config.getini("ranks_preload"), *_MODULES]
        work = _OnRank(config, modules, transformer_engine).serve
        server = RankPool(1, work, SpawnContext(), {"OMP_NUM_THREADS": "1", **env, **_WITHOUT})
        config.add_cleanup(server.close)
        server.start()
    try:
        server.ranks[0].pipe.send(request)
        result = server.ranks[0].pipe.recv()
    except BaseException as error:
        server.close()
        if isinstance(error, EOFError | OSError):
            raise RanksFailed("the process that forks ranks has died; its messages are on stderr") from error
        raise
    unused = [server]
    if not fresh:  # the latest three are kept, each of which has some hundred MB
        unused = [servers.pop(name) for name in [key, *[*servers][:-2]] if name in servers]
        servers[key] = server
    for old in unused:
        old.close()
    return result


def _pickled(name: str, value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:  # whose message often names another object
        hint = "use it in a test without ranks, or make such a value in the body of the test"
        raise InvalidInputError(f"{name} cannot be pickled and belongs to pytest's process: {hint}") from None


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
            kind, args, attributes = pickle.loads(self.error)
            error = kind.__new__(kind, *args)  # as its constructor may need others
            vars(error).update(attributes)
            return error
        if isinstance(self.report.longrepr, tuple):  # of a skip
            reason = self.report.longrepr[2].removeprefix("Skipped: ")
            return pytest.skip.Exception(reason, _use_item_location=True)
        return pytest.fail.Exception(str(self))


class _OnRank:
    """A plugin of a pytest that collects nothing: its process forks ranks, which run one test each."""

    result: _Result | None = None

    def __init__(self, config: pytest.Config, modules: list[str], transformer_engine: bool | str) -> None:
        self.modules, self.transformer_engine = modules, transformer_engine
        self.options = {name: config.getoption(name) for name in _OPTIONS if hasattr(config.option, name)}
        self.command = [f"-c{os.devnull}", f"--rootdir={config.rootpath}", "--noconftest", "-s"]
        self.command += [f"-pno:{x}" for x in ("terminal", "debugging", "faulthandler", "cacheprovider")]
        self.command += [f"-W{text}" for text in config.getoption("pythonwarnings") or ()]
        for name in _INI:
            with suppress(ValueError):  # a release of pytest does not have the setting
                if value := config.getoption(name, None) or config.getini(name):
                    text = "\n".join(value) if isinstance(value, list) else value
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
        with warnings.catch_warnings(), suppress(MegatronRLPatchesError):  # ranks raise it, too
            warnings.simplefilter("ignore")  # of what is not installed
            layers = self.transformer_engine
            with cpu_backend(transformer_engine=layers) if layers else nullcontext():
                for name in self.modules:
                    with suppress(ImportError):
                        import_module(name)
        warnings.filters[:] = self.filters  # type: ignore[index]  # pytest sets its own around each test
        gc.freeze()  # what is imported is no garbage: collections in forks take a fraction of the time
        with suppress(EOFError, OSError):
            while True:
                directory, (work, size, timeout, env) = self.pipe.recv()
                os.chdir(directory)
                work = partial(self._run, session, work) if isinstance(work, SimpleNamespace) else work
                with tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True) as self.output:
                    outcome = run_on_ranks(work, size, timeout, env, ForkContext(), self.output)
                    files = sorted(Path(self.output).iterdir())
                    output = {file.name: text for file in files if (text := file.read_text(errors="replace"))}
                self.pipe.send((outcome, output))
        signal.pause()  # the user's pytest has ended, and this process is about to be killed

    def _run(self, session: pytest.Session, job: SimpleNamespace, start: Callable[[], None]) -> Any:
        """Run a test. What it prints is in files, also if the rank dies."""
        captured = self.options.get("capture") != "no"
        for descriptor, stream in enumerate([sys.stdout, sys.stderr] if captured else [], 1):
            file = f"{self.output}/{stream.name.strip('<>')} on rank {os.environ['RANK']}"
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

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        self.error: Any = call.excinfo and call.excinfo.value

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not (report.passed or self.result):
            pickled = b""
            with suppress(Exception):
                pickled = pickle.dumps((type(self.error), self.error.args, vars(self.error)))
            self.result = _Result(report, pickled, report.failed)
