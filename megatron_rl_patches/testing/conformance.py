"""Run a checkout's own unit tests, with or without patches, each at the number of ranks that it needs."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..errors import InvalidInputError, MegatronRLPatchesError
from . import verdicts
from .verdicts import Result, read_results

# Exit codes of pytest: all tests passed, some failed, none was selected.
_EXIT_CODES = (0, 1, 5)


class TestsNotRun(MegatronRLPatchesError):
    """pytest ended before it had run the tests; the message holds the end of its output."""

    __test__ = False


def run(
    checkout: Path | str,
    select: Iterable[str] = ("tests/unit_tests",),
    *,
    ranks: int = 1,
    patches: str = "",
    results: Path | str,
    only: Collection[str] | None = None,
    hang_after: float = 60.0,
) -> Iterator[Result]:
    """Run tests of Megatron-LM at a number of ranks, and yield what became of each as soon as it is known.

    pytest runs in a process of its own, with the plugin ``megatron_rl_patches.testing.megatron_tests``.
    Tests for which ``results`` has a line already, at these ranks and patches, are neither run nor yielded,
    so a run that was interrupted goes on where it was.

    Args:
        checkout: the folder of Megatron-LM.
        select: files, folders or node ids, relative to the checkout.
        ranks: how many processes run each test.
        patches: "" for none, "all", or names with commas between them.
        results: the file that gets a line per test, all of one commit.
        only: node ids; of the selected tests, others are left out.
        hang_after: seconds after which a test is cut off.

    Raises:
        TestsNotRun: pytest could not collect the tests, or was killed.
        InvalidInputError: ``results`` has results of another commit, or ``hang_after`` is not greater than 0.
    """
    checkout, results = Path(checkout).resolve(), Path(results).resolve()
    if not 0 < hang_after < math.inf:
        raise InvalidInputError(f"hang_after is {hang_after:g}; expected a number of seconds greater than 0")
    commit = verdicts.commit_of(checkout)
    if others := {result.commit for result in read_results(results)} - {commit}:
        raise InvalidInputError(
            f"{results} has results of {others.pop() or 'an unknown commit'}, and {checkout} is at "
            f"{commit or 'an unknown commit'}: remove the file, or pass another one"
        )
    known_bytes = results.stat().st_size if results.exists() else 0
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        options = [f"--ranks={ranks}", f"--patches={patches}", f"--results={results}"]
        if only is not None:
            listed = Path(folder, "only")
            listed.write_text("\n".join(only))
            options.append(f"--only={listed}")
        command = [sys.executable, "-m", "pytest", "-p", f"{__package__}.megatron_tests", "-o", "addopts="]
        command += ["-p", "no:cacheprovider", "--tb=short", "-q", f"--rootdir={checkout}", *options]
        command += [f"--hang-after={hang_after}", *select]
        output = Path(folder, "output")
        with open(output, "w") as file, _started(command, checkout, file.fileno()) as process:
            try:
                yield from _added(results, known_bytes, process)
            finally:
                _end(process)
        if process.returncode not in _EXIT_CODES:
            end = output.read_text()[-4000:]
            raise TestsNotRun(f"pytest ended with exit code {process.returncode}:\n{end}")


def _added(results: Path, read: int, process: subprocess.Popen[bytes]) -> Iterator[Result]:
    """Yield the results that a process appends to a file of so many bytes, until it has ended."""
    finished = False
    while not finished:
        finished = process.poll() is not None
        text = b""
        if results.exists():
            with open(results, "rb") as file:
                file.seek(read)
                text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        read += len(complete)
        yield from verdicts.parse_results(complete)
        if not finished:
            time.sleep(0.2)


def run_at_smallest(
    checkout: Path | str,
    select: Iterable[str] = ("tests/unit_tests",),
    *,
    ranks: Sequence[int] = (1, 2, 4, 8),
    patches: str = "",
    results: Path | str,
    hang_after: float = 60.0,
) -> Iterator[Result]:
    """Run each selected test at the first of these numbers of ranks, and at the next ones until it passes.

    Only tests that need more ranks or fail run again, unless their message shows that this number of ranks
    does not help either. ``verdicts.final`` selects one result per test in the end.
    """
    results = Path(results)
    for count in ranks:
        again = [one.nodeid for one in verdicts.final_of(results, patches) if _may_pass_at(count, one)]
        if count == ranks[0]:
            yield from run(
                checkout, select, ranks=count, patches=patches, results=results, hang_after=hang_after
            )
        elif again:
            yield from _run_only(checkout, again, count, patches, results, hang_after)


def run_with_patches(
    checkout: Path | str, patches: str, *, results: Path | str, hang_after: float = 60.0
) -> Iterator[Result]:
    """Run with patches the tests that could run without them according to ``results``, at as many ranks."""
    results = Path(results)
    by_ranks: dict[int, list[str]] = {}
    for result in verdicts.final_of(results):
        if result.outcome != verdicts.NOT_RUNNABLE:
            by_ranks.setdefault(result.ranks, []).append(result.nodeid)
    for count, only in sorted(by_ranks.items()):
        yield from _run_only(checkout, only, count, patches, results, hang_after)


_NOT_COLLECTED = "it was not collected"


class Change(NamedTuple):
    """A test whose verdict differs between a run without and a run with patches."""

    without: Result
    patched: Result


def changes(results: Path | str, patches: str) -> list[Change]:
    """Return the tests whose verdicts these patches have changed, according to a results file.

    The run with the patches must have ended: a test that it has no result of, as its file could not be
    collected, counts as changed.
    """
    results = Path(results)
    patched = {(one.nodeid, one.ranks): one for one in read_results(results) if one.patches == patches}
    if not patched:
        return []

    def with_patches(one: Result) -> Result:
        absent = replace(one, patches=patches, outcome=verdicts.FAILED, message=_NOT_COLLECTED)
        return patched.get((one.nodeid, one.ranks), absent)

    can_run = (one for one in verdicts.final_of(results) if one.outcome != verdicts.NOT_RUNNABLE)
    pairs = [Change(one, with_patches(one)) for one in can_run]
    return [pair for pair in pairs if _verdict(pair.without) != _verdict(pair.patched)]


def repeated_changes(
    checkout: Path | str, changed: Sequence[Change], patches: str, *, hang_after: float = 60.0
) -> list[Change]:
    """Run the files of tests whose verdict has changed once more, both ways, and return what changes again.

    A test that depends on timing may give another verdict without any patch. So may one that depends on the
    tests before it, of which a run with patches leaves out those that cannot run; here all of them run.
    """
    again: list[Change] = []
    for count in sorted({change.without.ranks for change in changed}):
        nodeids = {change.without.nodeid for change in changed if change.without.ranks == count}
        files = sorted({_file_of(nodeid) for nodeid in nodeids})
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            results = Path(folder, "results")
            for names in ("", patches):
                both = run(
                    checkout, files, ranks=count, patches=names, results=results, hang_after=hang_after
                )
                deque(both, maxlen=0)
            again += [change for change in changes(results, patches) if change.without.nodeid in nodeids]
    return again


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _run_only(
    checkout: Path | str, only: Collection[str], ranks: int, patches: str, results: Path, hang_after: float
) -> Iterator[Result]:
    files = sorted({_file_of(nodeid) for nodeid in only})
    return run(
        checkout, files, ranks=ranks, patches=patches, results=results, only=only, hang_after=hang_after
    )


def _verdict(result: Result) -> tuple[str, str]:
    return result.outcome, result.reason


def _may_pass_at(ranks: int, result: Result) -> bool:
    # Messages of tests that lack ranks differ, and some tests fail without such a message.
    unsettled = result.reason == verdicts.MORE_RANKS or result.outcome == verdicts.FAILED
    return unsettled and ranks > result.ranks and ranks % verdicts.ranks_needed(result.message) == 0


def _started(command: Sequence[str], checkout: Path, output: int) -> subprocess.Popen[bytes]:
    # The patches are those that the caller asks for, and no others.
    variables = {name: value for name, value in os.environ.items() if name != "MEGATRON_RL_PATCHES"}
    # Some tests call ``python3`` and ``python3-config``, to build what Megatron's datasets have in C++.
    own = (str(Path(sys.executable).parent), str(Path(sys.base_prefix, "bin")))
    variables["PATH"] = os.pathsep.join([*own, variables.get("PATH", os.defpath)])
    return subprocess.Popen(
        command, cwd=checkout, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt pytest if it still runs, so that it ends its ranks and removes their files."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
