"""Run a function on several gloo ranks, each a process of its own on this machine."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection, get_context, get_start_method, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from ..errors import MegatronRLPatchesError

# How long ranks may go on after the first failure: those that fail for the same reason are reported too.
_GRACE_SECONDS = 2.0


class RanksFailed(MegatronRLPatchesError):
    """Some rank raised, died or did not finish in time.

    The message holds the traceback of every failed rank, the first to fail first, and the stacks of the
    ranks that were still running. ``ranks`` are the failed ranks in that order (empty on a mere timeout).
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class _Outcome(NamedTuple):
    """What a rank leaves behind in its file."""

    value: Any
    traceback: str | None
    finished: float  # time.monotonic(), which the processes of one machine share


class _Rank(NamedTuple):
    number: int
    process: BaseProcess
    outcome_file: Path
    stack_file: Path

    def outcome(self) -> _Outcome | None:
        """What the rank left behind; ``None`` while it runs; a made-up failure when it died silently."""
        if self.process.exitcode is None:
            return None
        with suppress(FileNotFoundError):
            return pickle.loads(self.outcome_file.read_bytes())
        last_words = f"exit code {self.process.exitcode}, no traceback\n{self.stack()}"
        return _Outcome(None, last_words, time.monotonic())

    def stack(self) -> str:
        return self.stack_file.read_text() if self.stack_file.exists() else ""


def spawn_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on ``world_size`` ranks and return what each returned, by rank.

    Each rank is a fresh interpreter with ``torch.distributed`` initialised on gloo, one torch thread, and
    ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` set;
    runs do not disturb each other. Environment variables are inherited, ``env`` added, and are there from
    the start of the interpreter. ``function``, its arguments and results must be picklable; as with any
    spawned process, a script that calls this needs ``if __name__ == "__main__":``.

    Many short runs spend most of their time on imports. With ``forkserver`` as the program's start method
    (``multiprocessing.set_start_method``) and, say, ``set_forkserver_preload(["megatron.core"])`` from there,
    a rank is a fork of a process that has imported these modules once. The variables are then set after the
    imports, so a run with an ``env`` gets fresh interpreters all the same.

    ``timeout`` is in seconds for the whole run; a collective gives up after half of it.

    Raises :class:`RanksFailed` when a rank raises, dies, or is not done in time. No process outlives the
    call.
    """
    deadline = time.monotonic() + timeout
    payload = pickle.dumps((function, args, kwargs))
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
        ranks: list[_Rank] = []
        try:
            port = _free_port()
            for number in range(world_size):
                ranks.append(_start(number, world_size, port, Path(folder), payload, timeout, env or {}))
            return _collect(ranks, deadline, timeout)
        finally:
            for rank in ranks:
                _kill(rank.process)


def _start(
    number: int,
    world_size: int,
    port: int,
    folder: Path,
    payload: bytes,
    timeout: float,
    env: Mapping[str, str],
) -> _Rank:
    outcome_file, stack_file = folder / f"outcome{number}", folder / f"stack{number}"
    variables = {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        # The machine's own name often does not resolve on a laptop without a network.
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        **env,
    }
    forked = not env and get_start_method(allow_none=True) == "forkserver"
    context = get_context("forkserver") if forked else get_context("spawn")
    with mock.patch.dict(os.environ, variables):
        process = context.Process(
            target=_run_rank,
            args=(
                payload,
                dict(os.environ),
                str(folder / "rendezvous"),
                str(outcome_file),
                str(stack_file),
                timeout / 2,
            ),
            name=f"rank {number}",
        )
        process.start()
    return _Rank(number, process, outcome_file, stack_file)


def _collect(ranks: Sequence[_Rank], deadline: float, timeout: float) -> list[Any]:
    outcomes: dict[int, _Outcome] = {}
    failed: list[int] = []
    while len(outcomes) < len(ranks) and (remaining := deadline - time.monotonic()) > 0:
        running = [rank.process.sentinel for rank in ranks if rank.number not in outcomes]
        connection.wait(running, remaining)
        for rank in ranks:
            outcome = rank.outcome() if rank.number not in outcomes else None
            if outcome is not None:
                outcomes[rank.number] = outcome
        if not failed and any(outcome.traceback for outcome in outcomes.values()):
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        failed = [number for number, outcome in outcomes.items() if outcome.traceback]

    if not failed and len(outcomes) == len(ranks):
        return [outcomes[rank.number].value for rank in ranks]
    failed.sort(key=lambda number: outcomes[number].finished)
    unfinished = [rank for rank in ranks if rank.number not in outcomes]
    raise RanksFailed(_message(failed, outcomes, unfinished, timeout), failed)


def _message(
    failed: Sequence[int], outcomes: Mapping[int, _Outcome], unfinished: Sequence[_Rank], timeout: float
) -> str:
    running = ", ".join(str(rank.number) for rank in unfinished)
    if failed:
        headline = f"rank {failed[0]} failed" + (" first" if len(failed) > 1 else "")
    else:
        headline = f"no result after {timeout:g} s; still running: rank {running}"
    parts = [headline]
    parts += [f"--- rank {number} ---\n{outcomes[number].traceback}" for number in failed]
    parts += [
        f"--- rank {rank.number}, still running, was here ---\n{_interrupt(rank)}" for rank in unfinished
    ]
    return "\n".join(parts)


def _interrupt(rank: _Rank) -> str:
    """The stacks of a running rank's threads."""
    if not rank.stack_file.exists():
        return "(starting)"
    with suppress(ProcessLookupError):
        os.kill(rank.process.pid or 0, signal.SIGUSR1)
    give_up = time.monotonic() + 1.0
    while not rank.stack() and time.monotonic() < give_up:
        time.sleep(0.02)
    time.sleep(0.02)
    return rank.stack()


def _kill(process: BaseProcess) -> None:
    # The rank leads a process group of its own, so what it started goes with it.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()
    process.join()
    process.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run_rank(
    payload: bytes,
    variables: Mapping[str, str],
    rendezvous: str,
    outcome_file: str,
    stack_file: str,
    collective_timeout: float,
) -> None:
    """The life of one rank, in its own process."""
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(variables)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with open(stack_file, "w") as stack:
        faulthandler.enable(stack)
        faulthandler.register(signal.SIGUSR1, stack)
        try:
            outcome = _Outcome(_call(payload, rendezvous, collective_timeout), None, time.monotonic())
            result = pickle.dumps(outcome)
        except BaseException:
            result = pickle.dumps(_Outcome(None, traceback.format_exc(), time.monotonic()))
            _hand_over(result, outcome_file)
            # An orderly shutdown would join gloo's threads, which may wait for a rank that is gone.
            os._exit(1)
        _hand_over(result, outcome_file)


def _call(payload: bytes, rendezvous: str, collective_timeout: float) -> Any:
    import torch.distributed

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=collective_timeout),
    )
    function, args, kwargs = pickle.loads(payload)
    value = function(*args, **kwargs)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return value


def _hand_over(result: bytes, outcome_file: str) -> None:
    partial = Path(outcome_file + ".partial")
    partial.write_bytes(result)
    partial.rename(outcome_file)
    sys.stdout.flush()
    sys.stderr.flush()


def _die_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
