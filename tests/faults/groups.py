"""Process groups whose collectives time out soon, and which can be replaced by new ones after that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

# Long enough for what goes well on a busy machine, short enough to wait for.
TIMEOUT = timedelta(seconds=3)
_AT_MOST = timedelta(seconds=60)


@contextmanager
def short_lived_groups(folder: Path, name: str) -> Iterator[dist.Store]:
    """Replace all groups, also the default one, by some that time out; yield a store for :func:`meet`."""
    from megatron.core import parallel_state

    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / name), 2)
    store.set_timeout(_AT_MOST)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("default", store), rank=rank, world_size=world, timeout=TIMEOUT
    )
    initialize = partial(
        parallel_state.initialize_model_parallel, distributed_timeout_minutes=TIMEOUT.total_seconds() / 60
    )
    with mock.patch.object(parallel_state, "initialize_model_parallel", initialize):
        yield store


@contextmanager
def worlds_of(size: int, folder: Path, name: str) -> Iterator[int]:
    """Divide the ranks into worlds that do not know each other; yield the number of this rank's world."""
    world, rank = divmod(dist.get_rank(), size)
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / f"{name} {world}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_AT_MOST)
    dist.barrier()  # a rank that left now would close connections that others are still making
    yield world


def meet(store: dist.Store, place: str, rank: int) -> None:
    """Wait for the other of two ranks."""
    store.set(f"{place}, {rank}", "here")
    store.wait([f"{place}, {1 - rank}"])


def error_of(call: Callable[[], Any]) -> str:
    """Return the error that a call raises, as it would be printed."""
    try:
        call()
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return "no error"


def timed_out(error: str) -> bool:
    """Return whether gloo's error says that a wait timed out, or a connection was closed after one did."""
    return "Timed out" in error or "Application timeout" in error
