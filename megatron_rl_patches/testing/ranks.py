"""Run a function on several gloo ranks, each a process of its own on this machine."""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from functools import partial
from multiprocessing import get_start_method
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext, ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

from ..errors import InvalidInputError, MegatronRLPatchesError
from .rank_pool import RankPool, send


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

    After ``multiprocessing.set_start_method("forkserver")``, and without ``env``, a rank is a fork of a
    process that has imported the modules of ``set_forkserver_preload([...])`` once. The module
    ``megatron_rl_patches.testing.preload`` imports Megatron, with the stand-in of TransformerEngine.

    Args:
        function: a picklable function, and so are its arguments and results. As with any spawned process, a
            script that calls this needs ``if __name__ == "__main__":``.
        world_size: how many ranks to start.
        args: positional arguments of the function, as ``kwargs`` are its keyword arguments.
        timeout: seconds for the whole run; a collective gives up after half of it.
        env: environment variables, set from the start of the interpreter, besides those inherited.

    Raises:
        RanksFailed: a rank raised, died, or was not done in time.
        InvalidInputError: a name or a value in ``env`` is no string.
    """
    for name, value in (env or {}).items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise InvalidInputError(f"env has {name!r}: {value!r}; expected a string for a string")
    payload = pickle.dumps((function, args, kwargs))
    # Forks get their variables after the imports, which is too late for those of the caller.
    forked = not env and get_start_method(allow_none=True) == "forkserver"
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
        call = partial(_call_in_a_group, payload, f"file://{folder}/rendezvous", timeout / 2)
        context = ForkServerContext() if forked else SpawnContext()
        variables = {"OMP_NUM_THREADS": "1", **(env or {})}
        results = call_on_ranks(call, world_size, Path(folder), timeout, variables, context)
    return [pickle.loads(result) for result in results]


def _call_in_a_group(payload: bytes, rendezvous: str, collective_timeout: float) -> bytes:
    import torch.distributed

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=collective_timeout)
    torch.distributed.init_process_group("gloo", rendezvous, limit, rank=rank, world_size=size)
    # A rank that is done at once would close connections that another rank is still making.
    torch.distributed.barrier()
    function, args, kwargs = pickle.loads(payload)
    # Pickled here, since a pipe would share the memory of tensors with a process that is about to end.
    return pickle.dumps(function(*args, **kwargs))


def call_on_ranks(
    function: Callable[[], Any],
    size: int,
    folder: Path,
    timeout: float,
    env: Mapping[str, str],
    context: BaseContext,
) -> list[Any]:
    """Call a function on ranks without a process group, and return what each returned, by rank.

    Raises:
        RanksFailed: a rank raised, died, or was not done in time.
    """
    with closing(RankPool(size, folder, partial(_send_result, function), context, env)) as pool:
        pool.start()
        outcome = pool.wait(timeout)
    sent = dict(outcome.sent) | outcome.died
    if outcome.went_well:
        return [sent[rank] for rank in range(size)]
    if failed := outcome.failed:
        message = f"rank {failed[0]} failed" + (" first" if len(failed) > 1 else "")
    else:
        message = f"no result after {timeout:g} s; still running: rank {', '.join(map(str, outcome.stacks))}"
    for rank in failed:
        message += f"\n--- rank {rank} ---\n{sent[rank]}"
    for rank, stacks in outcome.stacks.items():
        message += f"\n--- rank {rank}, still running, was here ---\n{stacks}"
    raise RanksFailed(message, failed)


def _send_result(function: Callable[[], Any], pipe: Connection, folder: Path) -> None:
    """Send what the function returns, or the traceback of what it raises as a failure."""
    try:
        send(pipe, function(), False)
    except BaseException:
        send(pipe, traceback.format_exc(), True)
    pipe.send(None)
