"""A pytest plugin that runs Megatron-LM's own unit tests on a CPU, each rank a process on gloo::

    cd Megatron-LM
    python -m pytest -p megatron_rl_patches.testing.megatron_tests -o addopts="" --ranks 2 tests/unit_tests

The tests and their conftest are taken from the checkout as they are. They are collected once; the ranks are
forks of that process, made anew for each test file and after each test that did not pass, so that neither
files nor failures affect what comes after them.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest

from . import megatron_ranks
from .conformance import (
    CUDA_KERNEL,
    DATA,
    FAILED,
    GPU_TENSOR,
    HANGS,
    MORE_RANKS,
    NOT_RUNNABLE,
    OTHER_PACKAGE,
    PASSED,
    SKIPPED,
    TRANSFORMER_ENGINE,
    Result,
    commit_of,
    read_results,
)
from .cpu_backend import cpu_backend
from .rank_pool import Outcome, RankPool, group_variables

_MESSAGE_LENGTH = 2000
_DOWNLOAD = "tests.test_utils.python_scripts.download_unit_tests_dataset"
_until_exit = ExitStack()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("megatron-lm", "unit tests of Megatron-LM on a CPU")
    group.addoption("--ranks", type=int, default=1, metavar="N", help="number of ranks (default: 1)")
    group.addoption("--patches", default="", metavar="NAMES", help="patches to apply: names, or all")
    group.addoption("--hang-after", type=float, default=60.0, metavar="SECONDS", help="default: 60")
    group.addoption("--results", type=Path, metavar="FILE", help="gets a line per test; leave out its tests")
    group.addoption("--only", type=Path, metavar="FILE", help="run only the tests that this file lists")


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
    download = ModuleType(_DOWNLOAD)
    for name in ("download_and_extract_asset", "get_oldest_release_and_assets"):
        setattr(download, name, megatron_ranks.do_nothing)
    sys.modules[_DOWNLOAD] = download

    import torch

    torch.set_num_threads(1)
    _until_exit.enter_context(cpu_backend())
    if options.patches:
        import megatron_rl_patches

        names = () if options.patches == "all" else options.patches.split(",")
        megatron_rl_patches.apply(*names)
    try:
        import_module("tests.unit_tests.conftest")
    except Exception as error:  # packages of the wrong version raise other errors than ImportError
        options.noconftest = True
        early_config.pluginmanager.register(megatron_ranks)
        early_config.issue_config_time_warning(
            pytest.PytestConfigWarning(f"Megatron's conftest is replaced, as it cannot be imported: {error}"),
            2,
        )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Conductor(config), "megatron-tests-conductor")


def pytest_unconfigure() -> None:
    _until_exit.close()


class _Verdict(NamedTuple):
    """Fields of a :class:`~.conformance.Result`."""

    outcome: str
    reason: str = ""
    message: str = ""


class _Conductor:
    """Runs the collected tests on the ranks and records what became of them."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.ranks: int = config.option.ranks
        self.patches: str = config.option.patches
        self.commit = commit_of(config.rootpath)
        results: Path | None = config.option.results
        if results and results.exists() and not results.read_bytes().endswith(b"\n"):
            with open(results, "a") as file:
                file.write("\n")  # the last line was cut off
        self._known = {
            result.nodeid
            for result in (read_results(results) if results else ())
            if (result.ranks, result.patches, result.commit) == (self.ranks, self.patches, self.commit)
        }

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        # Some files initialize torch.distributed when they are imported, and a fork cannot use its groups.
        nothing: dict[str, Any] = dict.fromkeys(
            ("initialize_distributed", "initialize_model_parallel"), megatron_ranks.do_nothing
        )
        with mock.patch.multiple(megatron_ranks.utils(), **nothing):
            return (yield)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        only: Path | None = self.config.option.only
        listed = set(only.read_text().splitlines()) if only else None
        chosen = [
            item
            for item in items
            if item.nodeid not in self._known and (listed is None or item.nodeid in listed)
        ]
        if left_out := [item for item in items if item not in set(chosen)]:
            self.config.hook.pytest_deselected(items=left_out)
            items[:] = chosen

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        if report.outcome == "passed":
            return report
        message = _skip_reason(report) or _last_lines(report.longreprtext)
        verdict = _judged(report.outcome, message, self.ranks)
        if report.nodeid not in self._known:
            self._record(report.nodeid, verdict, 0.0)
        if verdict.outcome == NOT_RUNNABLE:
            _make_skipped(report, collector.path, verdict)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly:
            return None
        with tempfile.TemporaryDirectory(prefix="megatron-tests-", ignore_cleanup_errors=True) as folder:
            pool = RankPool(
                self.ranks,
                Path(folder),
                partial(megatron_ranks.run_test, session),
                partial(megatron_ranks.prepare, session),
            )
            gc.freeze()  # or else each fork's first collection would copy most of the memory that they share
            numbered = enumerate(session.items)
            for _, file in groupby(numbered, key=lambda numbered_item: numbered_item[1].path):
                tests = list(file)
                followers = [number for number, _ in tests[1:]] + [None]
                try:
                    for (number, item), follower in zip(tests, followers, strict=True):
                        self._run(pool, item, (number, follower))
                        if session.shouldfail or session.shouldstop:
                            return True
                finally:
                    pool.close()
        return True

    def _run(self, pool: RankPool, item: pytest.Item, test: tuple[int, int | None]) -> None:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        began = time.perf_counter()
        run = pool.run(test, self.config.option.hang_after)
        seconds = time.perf_counter() - began
        to_report = partial(self.config.hook.pytest_report_from_serializable, config=self.config)
        reports = [(sent.rank, to_report(data=sent.value)) for sent in run.sent]
        verdict, shown = _judge(item, run, reports, seconds)
        self._record(item.nodeid, verdict, seconds)
        for report in shown:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _record(self, nodeid: str, verdict: _Verdict, seconds: float) -> None:
        message = verdict.message
        for folder in (str(self.config.rootpath), *filter(None, sys.path)):
            message = message.replace(f"{folder}/", "")
        if len(message) > _MESSAGE_LENGTH:
            half = _MESSAGE_LENGTH // 2
            message = f"{message[:half]}\n[...]\n{message[-half:]}"
        verdict = verdict._replace(message=message)
        result = Result(nodeid, self.ranks, self.patches, *verdict, round(seconds, 3), self.commit)
        if self.config.option.results:
            with open(self.config.option.results, "a") as file:
                file.write(result.to_json() + "\n")


def _judge(
    item: pytest.Item, run: Outcome, reports: list[tuple[int, pytest.TestReport]], seconds: float
) -> tuple[_Verdict, list[pytest.TestReport]]:
    """Return the verdict, and the reports that pytest is to show."""
    ranks = item.config.option.ranks
    of = f" of {ranks}"
    failed = next(((rank, report) for rank, report in reports if report.failed), None)
    if failed:
        rank, report = failed
        message = f"rank {rank}{of}: {getattr(report, 'raised', report.longreprtext)}"
        verdict = _judged("failed", message, ranks)
        report.sections.insert(0, ("Rank", f"rank {rank}{of} failed first"))
        if verdict.outcome == NOT_RUNNABLE:
            _make_skipped(report, item.path, verdict)
        return verdict, [report]
    if run.died or run.stacks:
        texts = run.died or {
            rank: f"was here after {seconds:.0f} s\n{text}" for rank, text in run.stacks.items()
        }
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords=dict.fromkeys(item.keywords, 1),
            outcome="failed",
            longrepr="\n".join(f"rank {rank}{of} {text}" for rank, text in texts.items()),
            when="call",
            duration=seconds,
        )
        lines = _MESSAGE_LENGTH // 100 // len(texts)
        message = "\n".join(f"rank {rank}{of} {_innermost(text, lines)}" for rank, text in texts.items())
        return _Verdict(FAILED if run.died else HANGS, message=message), [report]
    by_rank = {rank: [report for number, report in reports if number == rank] for rank, _ in reports}
    skips = {rank: next(filter(None, map(_skip_reason, own)), "") for rank, own in by_rank.items()}
    ran = [rank for rank, reason in skips.items() if not reason]
    shown = by_rank[ran[0] if ran else 0]
    return (_Verdict(PASSED) if ran else _judged("skipped", skips[0], ranks)), shown


def _innermost(stacks: str, lines: int) -> str:
    """Return the first line, and the innermost calls of the thread that runs the test."""
    first, _, rest = stacks.partition("\n")
    _, _, thread = rest.partition("Current thread")
    return "\n".join([first, *thread.splitlines()[1 : lines + 2]])


def _judged(outcome: str, message: str, ranks: int) -> _Verdict:
    reason = reason_of(message, skipped=outcome == SKIPPED, ranks=ranks)
    return _Verdict(NOT_RUNNABLE if reason else outcome, reason, message)


def _skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if not report.skipped or hasattr(report, "wasxfail"):
        return ""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return text.removeprefix("Skipped: ") or "no reason given"


def _make_skipped(report: pytest.TestReport | pytest.CollectReport, path: Path, verdict: _Verdict) -> None:
    report.outcome = "skipped"
    report.longrepr = (str(path), 0, f"Skipped: not runnable here: {verdict.reason}: {verdict.message}")


def _last_lines(text: str) -> str:
    """Return what was raised, which comes last in a traceback, and then the lines before it."""
    *before, raised = text.splitlines()[-4:] or [""]
    return "\n".join([raised.removeprefix("E").strip(), *before])


# --- why a test cannot run here

# Packages of CUDA kernels. Without a GPU their import fails, or they do nothing.
_KERNELS = (
    r"triton|apex|amp_C|flash_attn\w*|flash_mla|flashinfer|mamba_ssm|causal_conv1d|grouped_gemm|deep_ep|fla"
    r"|fast_hadamard_transform|nvshmem|cupy|cudnn|pynvml|kitchen|nvidia_kitchen"
)
# The first pattern that matches the message gives the reason.
_RAISED = [
    (MORE_RANKS, r"world.?size \(?\d+\)? is not divisible|not divisible by \w+ size|new group's world size"),
    (MORE_RANKS, r"over sized with world size|divisible by partial DistOpt shard factor"),
    (MORE_RANKS, r"Valid ranks are 0 to|assert \d+ <= \d+\n +\+  where \d+ = Utils\.world_size"),
    (
        TRANSFORMER_ENGINE,
        r"(?i:transformer.?engine)|\bTE[A-Z]\w+|\bte_\w+|NVTE|FP8GlobalStateManager|\bTE >=",
    ),
    # Where TransformerEngine is not installed, Megatron replaces its classes by mocks.
    (TRANSFORMER_ENGINE, r"spec_utils\.py:\d+: module = import_module"),
    (TRANSFORMER_ENGINE, r"Mock object has no attribute '(weight|module|cuda)'|fp8_utils' has no attribute"),
    (TRANSFORMER_ENGINE, r"StopIteration: \nat \S*unittest/mock\.py|StopIteration:  when instantiating"),
    (TRANSFORMER_ENGINE, r"str is not a Module subclass|isinstance\(\) arg 2 must be a type"),
    (CUDA_KERNEL, rf"No module named '({_KERNELS})\b|Mamba ?SSM is not installed|using cudagraphs with RNG"),
    # Without fused norms Megatron uses torch's, which refuses some of their options.
    (CUDA_KERNEL, r"Grouped GEMM is not available|not supported by torch LayerNorm|name 'causal_conv1d"),
    (CUDA_KERNEL, r"LayerNorm\.__init__\(\) got an unexpected keyword argument 'config'"),
    # On which device a tensor is, is what these tests ask, and the optimizer that keeps states on the CPU.
    (
        GPU_TENSOR,
        r"assert 'cpu' == 'cuda'|where False = .*\.is_cuda\b|hybrid_optimizer\.py:\d+: gpu_param = ",
    ),
    (GPU_TENSOR, r"assert device\(type='cpu'\) == device\(type='cuda'"),
    # These asserts stand before a kernel.
    (CUDA_KERNEL, r"assert .*\.is_cuda\b|must be on CUDA|self\.main_grad\.allocation_stream =="),
    (CUDA_KERNEL, r"0 active drivers|CUDA_HOME|nccl_allocator|libcuda\.so"),
    (CUDA_KERNEL, r"Torch not compiled with CUDA|/triton/|CUDA driver version is insufficient"),
    (CUDA_KERNEL, r"SymmetricMemory MemPool did not find backend"),
    (OTHER_PACKAGE, r"No module named '(?!megatron|tests)|could not import '|modelopt|is not installed"),
    (
        OTHER_PACKAGE,
        r"name 'nvtx' is not defined|package is required|`nvidia-resiliency-ext` installation is required",
    ),
    (DATA, r"FileNotFoundError|/opt/data|Tokenizer path doesn't exist"),
    (DATA, r"NameResolutionError|Max retries exceeded|couldn't connect|offline mode is enabled"),
]
# Reasons with which the authors of the tests skip them.
_SKIPPED = [
    (MORE_RANKS, r"(?i)world.?size|\d gpus|\branks\b|[} ]gpus\b"),
    (TRANSFORMER_ENGINE, r"\bTE\b|(?i:transformer.?engine)|\bTE[A-Z]\w+"),
    (
        CUDA_KERNEL,
        r"(?i)triton|apex|flash.?(?:att|infer)|fp8|fp4|cuda.?graph|nccl|nvshmem|deep ?ep|hybrid ?ep|amp_C",
    ),
    (CUDA_KERNEL, r"(?i)hopper|blackwell|(?:grouped|deep).?gemm|kitchen|\bFLA\b|fused|mamba"),
    (OTHER_PACKAGE, r"(?i)could not import|is required|not installed|is not available"),
    (DATA, r"(?i)does not exist|download"),
]


# Megatron-LM's own CI has eight GPUs, so a test that wants more ranks is skipped there, too.
_RANKS_IN_CI = 8


def reason_of(message: str, *, skipped: bool = False, ranks: int = 1) -> str:
    """Return why a test that raised or skipped with this message cannot run here; "" if that is not known."""
    rules = _SKIPPED if skipped else _RAISED
    reason = next((reason for reason, pattern in rules if re.search(pattern, message)), "")
    return "" if skipped and reason == MORE_RANKS and ranks >= _RANKS_IN_CI else reason
