"""Run a function on several gloo ranks, each a process of its own on this machine."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from pathlib import Path
from typing import Any

from ..errors import InvalidInputError, MegatronRLPatchesError
from .rank_pool import STARTED, Outcome, RankPool, send

#: For so long ranks may take to start: to import what they need.
_START_SECONDS = 300.0


class RanksFailed(MegatronRLPatchesError):
    """Some rank raised, died or did not finish in time.

    The message has the tracebacks of ``ranks`` in this order, and the stacks of ranks that still ran.

    Attributes:
        ranks: the failed ranks, the first to fail first; empty if ranks hang and none has failed.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


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
    runs do not disturb each other. No process outlives the call, or a caller that is killed, except one that
    a rank has started in a session of its own before the rank died.

    Args:
        function: a picklable function, and so are its arguments and results. As with any spawned process, a
            script that calls this needs ``if __name__ == "__main__":``.
        world_size: how many ranks to start.
        timeout: seconds from when all ranks have started; a collective does not give up earlier.
        env: environment variables, set from the start of the interpreter, besides those inherited.

    Raises:
        RanksFailed: a rank raised, died, or was not done in time.
        InvalidInputError: ``world_size``, ``timeout`` or ``env`` is wrong; no process has started.
    """
    check_arguments(world_size, timeout, env or {})
    work = partial(call, pickle.dumps((function, args, kwargs)))
    outcome = run_on_ranks(work, world_size, timeout, env or {}, SpawnContext())
    return [pickle.loads(result) for result in results_of(outcome, timeout)]


def check_arguments(count: Any, timeout: Any, env: Any) -> None:
    """Raise :class:`InvalidInputError` for a number of ranks, a timeout or variables that cannot be used."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise InvalidInputError(f"the number of ranks is {count!r}; expected an int of at least 1")
    if not isinstance(timeout, int | float) or not 0 < timeout <= 1e6:
        raise InvalidInputError(f"timeout is {timeout!r}; expected seconds: more than 0, at most a million")
    for name, value in env.items() if isinstance(env, Mapping) else [(env, None)]:
        if not (isinstance(name, str) and isinstance(value, str)):
            raise InvalidInputError(f"env has {name!r}: {value!r}; expected a mapping of strings to strings")


def call(payload: bytes, start: Callable[[], None]) -> bytes:
    """Call a pickled function on a rank, and return its pickled result."""
    function, args, kwargs = pickle.loads(payload)
    start()
    # Pickled here, since a pipe would share the memory of tensors with a process that is about to end.
    return pickle.dumps(function(*args, **kwargs))


def run_on_ranks(
    work: Callable[[Callable[[], None]], Any],
    size: int,
    timeout: float,
    env: Mapping[str, str],
    context: SpawnContext | ForkContext,
    parent: str | None = None,
) -> Outcome:
    """Call ``work(start)`` on ranks, and return what became of them.

    A rank calls ``start()`` when it has imported what it needs: it waits for the others, and initializes
    ``torch.distributed``. The time begins then. A result may be a failure: its ``is_failure`` is true.
    """
    # A collective that waits gives up after the deadline, at which the stacks of all ranks are written.
    serve = partial(_serve, work, _START_SECONDS + timeout)
    with closing(RankPool(size, serve, context, {"OMP_NUM_THREADS": "1", **env}, parent)) as pool:
        pool.start()
        return pool.wait(timeout, _START_SECONDS)


def _serve(work: Any, collective_timeout: float, pipe: Connection, folder: Path) -> None:
    """Send what a rank returns, or the traceback of what it raises as a failure."""

    def start() -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        place, limit = f"file://{folder}/rendezvous", timedelta(seconds=collective_timeout)
        dist.init_process_group("gloo", place, rank=rank, world_size=size, timeout=limit)
        # A rank that is done at once would close connections that another rank is still making.
        dist.barrier()
        pipe.send(STARTED)

    try:
        result = work(start)
        send(pipe, result, getattr(result, "is_failure", False))
    except BaseException:
        send(pipe, traceback.format_exc(), True)
    pipe.send(None)


def results_of(outcome: Outcome, timeout: float) -> list[Any]:
    """Return what the ranks have sent, by rank, or raise :class:`RanksFailed`."""
    sent = dict(outcome.sent) | outcome.died
    if outcome.went_well:
        return [sent[rank] for rank in sorted(sent)]
    if failed := outcome.failed:
        message = f"rank {failed[0]} failed" + (" first" if len(failed) > 1 else "")
    else:
        message = f"no result after {timeout:g} s; still running: rank {', '.join(map(str, outcome.stacks))}"
    for rank in failed:
        message += f"\n--- rank {rank} ---\n{sent[rank]}"
    for rank, stacks in outcome.stacks.items():
        message += f"\n--- rank {rank}, still running, was here ---\n{stacks}"
    raise RanksFailed(message, failed)
