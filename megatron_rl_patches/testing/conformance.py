"""Run a checkout's own unit tests, with or without patches, each at the number of ranks that it needs."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import IO, NamedTuple

from ..errors import InvalidInputError, MegatronRLPatchesError

PASSED, SKIPPED, NOT_RUNNABLE, FAILED, HANGS = OUTCOMES = (
    "passed",
    "skipped",
    "not_runnable",
    "failed",
    "hangs",
)
TRANSFORMER_ENGINE, CUDA_KERNEL, GPU_TENSOR, MORE_RANKS, DATA, OTHER_PACKAGE = REASONS = (
    "TransformerEngine",
    "CUDA kernel",
    "tensor on a GPU",
    "more ranks",
    "data",
    "other package",
)


@dataclass(frozen=True)
class Result:
    """What became of one test at one number of ranks; a line of a results file.

    Attributes:
        nodeid: the test, or a file whose import failed or which skips itself.
        ranks: how many ranks it ran on.
        patches: the patches that were in place, as given: "", "all" or names with commas between them.
        outcome: one of ``OUTCOMES``.
        reason: one of ``REASONS`` if the test is not runnable here, otherwise empty.
        message: what was raised or the reason of the skip, with the rank that failed first, or the stacks of
            the ranks that hang; empty if the test has passed.
        seconds: wall time.
        commit: that of the checkout, as :func:`commit_of` gives it.
    """

    nodeid: str
    ranks: int
    patches: str
    outcome: str
    reason: str = ""
    message: str = ""
    seconds: float = 0.0
    commit: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def commit_of(checkout: Path) -> str:
    """Return the checkout's commit, with a digest of what differs from it; empty without git."""

    def git(*arguments: str) -> bytes:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, capture_output=True, check=True).stdout.strip()

    try:
        commit, changed = git("rev-parse", "HEAD").decode(), git("diff", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{commit}+{sha256(changed).hexdigest()[:8]}" if changed else commit


def read_results(path: Path) -> Iterator[Result]:
    """Read a results file. Lines that were cut off are left out."""
    if path.exists():
        yield from _parsed(path.read_bytes())


def _parsed(lines: bytes) -> Iterator[Result]:
    for line in lines.splitlines():
        with suppress(ValueError):
            yield Result(**json.loads(line))


def final_of(path: Path, patches: str = "") -> list[Result]:
    """Return one result per test with these patches, of those in a file.

    It is the one at the fewest ranks at which the test passed, or else at the most ranks.
    """
    chosen: dict[str, Result] = {}
    for result in sorted(read_results(path), key=lambda result: result.ranks):
        before = chosen.get(result.nodeid)
        if result.patches == patches and (before is None or before.outcome != PASSED):
            chosen[result.nodeid] = result
    return list(chosen.values())


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
        only: node ids of all tests that are to run, in place of ``select``.
        hang_after: seconds after which a test is cut off.

    Raises:
        TestsNotRun: pytest could not collect the tests, or was killed.
        InvalidInputError: ``results`` has results of another commit, or ``hang_after`` is not greater than 0.
    """
    checkout, results = Path(checkout).resolve(), Path(results).resolve()
    if not 0 < hang_after < math.inf:
        raise InvalidInputError(f"hang_after is {hang_after:g}; expected a number of seconds greater than 0")
    commit = commit_of(checkout)
    if others := {result.commit for result in read_results(results)} - {commit}:
        raise InvalidInputError(
            f"{results} has results of {others.pop() or 'an unknown commit'}, and {checkout} is at "
            f"{commit or 'an unknown commit'}: remove the file, or pass another one"
        )
    known_bytes = results.stat().st_size if results.exists() else 0
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        options = [f"--ranks={ranks}", f"--patches={patches}", f"--results={results}"]
        if only is not None:
            select = sorted({_file_of(nodeid) for nodeid in only})
            listed = Path(folder, "only")
            listed.write_text("\n".join(only))
            options.append(f"--only={listed}")
        command = [sys.executable, "-m", "pytest", "-p", f"{__package__}.megatron_tests", "-o", "addopts="]
        command += ["-p", "no:cacheprovider", "--tb=short", "-q", f"--rootdir={checkout}", *options]
        command += [f"--hang-after={hang_after}", *select]
        output = Path(folder, "output")
        with open(output, "wb") as file, _running(command, checkout, file) as process:
            yield from _added(results, known_bytes, process)
        if process.returncode not in (0, 1, 5):  # all tests passed, some failed, none was selected
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
        yield from _parsed(complete)
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
    does not help either. :func:`final_of` selects one result per test in the end.
    """
    results = Path(results)
    run_tests = partial(run, checkout, patches=patches, results=results, hang_after=hang_after)
    yield from run_tests(select, ranks=ranks[0])
    for count in ranks[1:]:
        if again := [one.nodeid for one in final_of(results, patches) if _may_pass_at(count, one)]:
            yield from run_tests(ranks=count, only=again)


def run_with_patches(
    checkout: Path | str, patches: str, *, results: Path | str, hang_after: float = 60.0
) -> Iterator[Result]:
    """Run with patches the tests that could run without them according to ``results``, at as many ranks."""
    results = Path(results)
    by_ranks: dict[int, list[str]] = {}
    for result in final_of(results):
        if result.outcome != NOT_RUNNABLE:
            by_ranks.setdefault(result.ranks, []).append(result.nodeid)
    run_tests = partial(run, checkout, patches=patches, results=results, hang_after=hang_after)
    for count, only in sorted(by_ranks.items()):
        yield from run_tests(ranks=count, only=only)


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
    changed = []
    for one in final_of(results) if patched else ():
        if one.outcome != NOT_RUNNABLE:
            absent = replace(one, patches=patches, outcome=FAILED, message="it was not collected")
            other = patched.get((one.nodeid, one.ranks), absent)
            if (one.outcome, one.reason) != (other.outcome, other.reason):
                changed.append(Change(one, other))
    return changed


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
            run_files = partial(run, checkout, files, ranks=count, results=results, hang_after=hang_after)
            for names in ("", patches):
                deque(run_files(patches=names), maxlen=0)
            again += [change for change in changes(results, patches) if change.without.nodeid in nodeids]
    return again


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _may_pass_at(ranks: int, result: Result) -> bool:
    # Messages of tests that lack ranks differ, and some tests fail without such a message.
    unsettled = result.reason == MORE_RANKS or result.outcome == FAILED
    return unsettled and ranks > result.ranks and ranks % ranks_needed(result.message) == 0


@contextmanager
def _running(command: Sequence[str], checkout: Path, output: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Run pytest; if it still runs at the end, interrupt it, so that it ends its ranks and removes files."""
    # The patches are those that the caller asks for, and no others.
    variables = {name: value for name, value in os.environ.items() if name != "MEGATRON_RL_PATCHES"}
    # Some tests call ``python3`` and ``python3-config``, to build what Megatron's datasets have in C++.
    own = (str(Path(sys.executable).parent), str(Path(sys.base_prefix, "bin")))
    variables["PATH"] = os.pathsep.join([*own, variables.get("PATH", os.defpath)])
    with subprocess.Popen(
        command, cwd=checkout, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()


_NEEDED = re.compile(
    r"(?i)not divisible by (?:\w+ size )?\(?(\d+)|world_size=(\d+), but"
    r"|requires (?:at least )?(\d+) (?:gpus|ranks)"
)


def ranks_needed(message: str) -> int:
    """Return a divisor that the number of ranks must have according to the message; 1 if it names none."""
    match = _NEEDED.search(message)
    return int(match[match.lastindex or 0]) if match else 1
