"""Run a function on several gloo ranks, each a process of its own on this machine."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection, get_start_method
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from ..errors import MegatronRLPatchesError
from ._processes import become_group_leader, free_port, group_variables, kill, stacks_of, stacks_on_request

# How long ranks may go on after the first failure, so that others that fail alike are reported too.
_GRACE_SECONDS = 2.0


class RanksFailed(MegatronRLPatchesError):
    """Some rank raised, died or did not finish in time.

    The message holds the traceback of every failed rank, the first to fail first, and the stacks of the
    ranks that were still running.

    Attributes:
        ranks: the failed ranks, the first to fail first; empty if ranks hang and none has failed.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.ranks)


class _Outcome(NamedTuple):
    """Result or traceback, which the rank writes to its file."""

    value: Any
    traceback: str | None
    finished: float  # time.monotonic(), which the processes of one machine share


class _Rank(NamedTuple):
    number: int
    process: BaseProcess
    outcome_file: Path
    stack_file: Path

    def outcome(self) -> _Outcome | None:
        """Return the rank's outcome: ``None`` while it runs, and a failure if it died without a traceback."""
        if self.process.exitcode is None:
            return None
        with suppress(FileNotFoundError, EOFError, pickle.UnpicklingError):
            return pickle.loads(self.outcome_file.read_bytes())
        stacks = self.stack_file.read_text() if self.stack_file.exists() else ""
        death = f"exit code {self.process.exitcode}, no traceback\n{stacks}"
        return _Outcome(None, death, time.monotonic())


def spawn_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on ``world_size`` ranks and return what each returned, by rank.

    Each rank is a fresh interpreter with ``torch.distributed`` initialized on gloo, one torch thread, and
    ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` set;
    runs do not disturb each other. No process outlives the call, nor a caller that is killed.

    With ``forkserver`` as the program's start method (``multiprocessing.set_start_method``) and, say,
    ``set_forkserver_preload(["megatron.core"])``, a rank is a fork of a process that has imported these
    modules once, unless ``env`` is given.

    Args:
        function: a picklable function, and so are its arguments and results. As with any spawned process, a
            script that calls this needs ``if __name__ == "__main__":``.
        world_size: how many ranks to start.
        args: positional arguments of the function, as ``kwargs`` are its keyword arguments.
        timeout: seconds for the whole run; a collective gives up after half of it.
        env: environment variables, set from the start of the interpreter, besides those inherited.

    Raises:
        RanksFailed: a rank raised, died, or was not done in time.
    """
    deadline = time.monotonic() + timeout
    payload = pickle.dumps((function, args, kwargs))
    # Forks get their variables after the imports, which is too late for those of the caller.
    forked = not env and get_start_method(allow_none=True) == "forkserver"
    context = ForkServerContext() if forked else SpawnContext()
    variables = {**group_variables(world_size, free_port()), "OMP_NUM_THREADS": "1", **(env or {})}
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
        ranks: list[_Rank] = []
        try:
            for number in range(world_size):
                outcome_file, stack_file = (Path(folder, f"{kind}{number}") for kind in ("outcome", "stack"))
                with mock.patch.dict(os.environ, variables, RANK=str(number), LOCAL_RANK=str(number)):
                    process = context.Process(
                        target=_run_rank,
                        args=(payload, dict(os.environ), f"{folder}/rendezvous", outcome_file, stack_file),
                        kwargs={"collective_timeout": timeout / 2},
                        name=f"rank {number}",
                    )
                    process.start()
                ranks.append(_Rank(number, process, outcome_file, stack_file))
            return _collect(ranks, deadline, timeout)
        finally:
            for rank in ranks:
                kill(rank.process)


def _collect(ranks: Sequence[_Rank], deadline: float, timeout: float) -> list[Any]:
    outcomes: dict[int, _Outcome] = {}
    failed: list[int] = []
    while len(outcomes) < len(ranks) and (remaining := deadline - time.monotonic()) > 0:
        running = [rank for rank in ranks if rank.number not in outcomes]
        connection.wait([rank.process.sentinel for rank in running], remaining)
        outcomes |= {rank.number: outcome for rank in running if (outcome := rank.outcome()) is not None}
        if not failed and any(outcome.traceback for outcome in outcomes.values()):
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        failed = [number for number, outcome in outcomes.items() if outcome.traceback]

    if not failed and len(outcomes) == len(ranks):
        return [outcomes[rank.number].value for rank in ranks]
    failed.sort(key=lambda number: outcomes[number].finished)
    unfinished = [rank for rank in ranks if rank.number not in outcomes]
    if failed:
        message = f"rank {failed[0]} failed" + (" first" if len(failed) > 1 else "")
    else:
        numbers = ", ".join(str(rank.number) for rank in unfinished)
        message = f"no result after {timeout:g} s; still running: rank {numbers}"
    for number in failed:
        message += f"\n--- rank {number} ---\n{outcomes[number].traceback}"
    for rank in unfinished:
        stacks = stacks_of(rank.process, rank.stack_file) if rank.stack_file.exists() else "(starting)"
        message += f"\n--- rank {rank.number}, still running, was here ---\n{stacks}"
    raise RanksFailed(message, failed)


def _run_rank(
    payload: bytes,
    variables: Mapping[str, str],
    rendezvous: str,
    outcome_file: Path,
    stack_file: Path,
    collective_timeout: float,
) -> None:
    """Run the function in the process of its rank, and write its outcome."""
    become_group_leader(outcome_file.parent)
    os.environ.clear()
    os.environ.update(variables)
    with stacks_on_request(stack_file):
        try:
            value, failure = _call(payload, rendezvous, collective_timeout), None
            result = pickle.dumps(_Outcome(value, None, time.monotonic()))
        except BaseException:
            failure = traceback.format_exc()
            result = pickle.dumps(_Outcome(None, failure, time.monotonic()))
        outcome_file.write_bytes(result)
        sys.stdout.flush()
        sys.stderr.flush()
        # Destroying the process group would join gloo's threads. These may wait for a rank that has died, and
        # before torch 2.8 for the GIL, which the destructor holds (pytorch/pytorch#154976).
        os._exit(1 if failure else 0)


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
    # A rank that is done at once would close connections that another rank is still making.
    torch.distributed.barrier()
    function, args, kwargs = pickle.loads(payload)
    return function(*args, **kwargs)
