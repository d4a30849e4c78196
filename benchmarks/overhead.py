"""The processor time that the patch adds to one call of ``train()``, and to one call of a hook method.

Bare and patched calls take turns in short batches on real megatron-core, with a tiny GPT in real
DistributedDataParallel. Processor time does not count what other processes do meanwhile.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_rl_patches import Settings, applied
from megatron_rl_patches.engine.patch import Site
from megatron_rl_patches.engine.wrapper import SwitchableWrapper
from megatron_rl_patches.testing import TinyModel, spawn_ranks
from tests.references.one_device import gpu_or_cpu

from .measure import added
from .page import Benchmark, Table

BATCH, ROUNDS = 200, 60


@dataclass(frozen=True)
class Result:
    case: str
    bare_us: float
    patched_us: float
    added_us: float
    limit_us: float


@dataclass(frozen=True)
class Case:
    """The same calls of Megatron's methods, bare and patched.

    Attributes:
        calls: how many methods each of both functions calls.
        limit_us: how many microseconds the patch may add to one of them.
    """

    name: str
    bare: Callable[[], None]
    patched: Callable[[], None]
    calls: int
    limit_us: float


def train(model: Sequence[Any], optimizer: Any) -> None:
    """What every framework's `train` does before its first step, and nothing else."""
    config = model[0].config
    assert config.no_sync_func is None
    config.no_sync_func = model[0].no_sync


def measure(quick: bool) -> list[Result]:
    [results] = spawn_ranks(_measure, 1, 3 if quick else ROUNDS, timeout=600)
    return list(results)


def _measure(rounds: int) -> list[Result]:
    with patched():
        return [compare(case, rounds) for case in cases()]


@contextmanager
def patched() -> Iterator[str]:
    """Apply the patch on this rank, and yield its device."""
    settings = Settings(train_functions=("benchmarks.overhead:train",))
    with gpu_or_cpu() as device, applied("reentrant-train", settings=settings):
        yield device


def cases(bf16: bool = False) -> Iterator[Case]:
    """Yield each case when it can be called, which it is no more when the next one is asked for."""

    for gather in (False, True):
        model, optimizer = TinyModel(overlap_param_gather=gather, bf16=bf16).build()
        yield Case(
            f"train(), {'with' if gather else 'without'} overlapped parameter gather",
            functools.partial(_bare_train, model, optimizer),
            functools.partial(train, model, optimizer),
            calls=1,
            limit_us=2_000.0,
        )
    chunk = model[0]
    disable, enable = (vars(type(chunk))[f"{verb}_forward_pre_hook"] for verb in ("disable", "enable"))
    chunk.disable_forward_pre_hook(param_sync=False)

    def bare() -> None:
        enable.__wrapped__(chunk)
        disable.__wrapped__(chunk, param_sync=False)

    def both() -> None:
        chunk.enable_forward_pre_hook()
        chunk.disable_forward_pre_hook(param_sync=False)

    yield Case("disable + enable_forward_pre_hook", bare, both, calls=2, limit_us=10.0)
    wrapped = SwitchableWrapper(_nothing, lambda call: call(), Site(__name__, "_nothing", ""), None)
    wrapped.switch(True)
    yield Case("any function, by an adapter that calls it", _nothing, wrapped, calls=1, limit_us=1.0)
    off_already = functools.partial(chunk.disable_forward_pre_hook, param_sync=False)
    yield Case("disable_forward_pre_hook, off already", lambda: None, off_already, calls=1, limit_us=10.0)


def _nothing() -> None:
    pass


def _bare_train(model: Sequence[Any], optimizer: Any) -> None:
    model[0].config.no_sync_func = None
    train.__wrapped__(model, optimizer)  # type: ignore[attr-defined]


def compare(case: Case, rounds: int) -> Result:
    def microseconds(function: Callable[[], None]) -> float:
        begin = time.process_time()
        for _ in range(BATCH):
            function()
        return (time.process_time() - begin) / BATCH / case.calls * 1e6

    bare, differences = added(lambda: microseconds(case.bare), lambda: microseconds(case.patched), rounds)
    patched = statistics.median(map(sum, zip(bare, differences, strict=True)))
    return Result(case.name, statistics.median(bare), patched, statistics.median(differences), case.limit_us)


def row(result: Result) -> dict[str, str]:
    return {
        "call": result.case,
        "bare (µs)": f"{result.bare_us:.2f}",
        "patched (µs)": f"{result.patched_us:.2f}",
        "added (µs)": f"{result.added_us:+.2f}",
        "claim (µs)": f"< {result.limit_us:g}",
    }


BENCHMARK = Benchmark(
    measure,
    parts=lambda results: {"overhead": Table(1, [*map(row, results)])},
    is_met=lambda results: all(result.added_us < result.limit_us for result in results),
)
