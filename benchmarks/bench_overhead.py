"""The time that the patch adds to one call of `train()`, and to one call of a hook method.

    python -m benchmarks.bench_overhead [--rounds N]

One rank, real megatron-core, a tiny GPT in real DistributedDataParallel, on a GPU if there is one. Bare and
patched calls take turns in short batches, so that a busy machine slows down both; the result is the median of
the differences.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rl_patches import Settings, applied
from megatron_rl_patches.testing import spawn_ranks
from tests.real.one_device import gpu_or_cpu

from . import _machine

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "overhead.md"
BATCH = 200


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help=f"batches of {BATCH} calls for each case")
    rounds = parser.parse_args(arguments).rounds
    # By its importable name: as __main__ this module could not be patched.
    from benchmarks import bench_overhead

    [results] = spawn_ranks(bench_overhead.measure, 1, rounds, timeout=600)
    page = render(results, rounds)
    print(page)
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page)
    return int(any(r.added_us >= r.limit_us for r in results))


def measure(rounds: int) -> list[Result]:
    with patched():
        return [compare(case, rounds) for case in cases()]


@contextmanager
def patched() -> Iterator[str]:
    """Apply the patch on this rank, and yield its device."""
    settings = Settings(train_functions=("benchmarks.bench_overhead:train",))
    with gpu_or_cpu() as device, applied("reentrant-train", settings=settings):
        yield device


def cases(bf16: bool = False) -> Iterator[Case]:
    """Yield each case when it can be called, which it is no more when the next one is asked for."""
    from tests.real import tiny_gpt

    for gather in (False, True):
        model, optimizer = tiny_gpt.build(tiny_gpt.Options(overlap_param_gather=gather, bf16=bf16))
        yield Case(
            f"train(), {'with' if gather else 'without'} overlapped parameter gather",
            functools.partial(_bare_train, model, optimizer),
            functools.partial(train, model, optimizer),
            calls=1,
            limit_us=150.0,
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
    off_already = functools.partial(chunk.disable_forward_pre_hook, param_sync=False)
    yield Case("disable_forward_pre_hook, off already", lambda: None, off_already, calls=1, limit_us=10.0)


def _bare_train(model: Sequence[Any], optimizer: Any) -> None:
    model[0].config.no_sync_func = None
    train.__wrapped__(model, optimizer)  # type: ignore[attr-defined]


def compare(case: Case, rounds: int) -> Result:
    bare_us: list[float] = []
    patched_us: list[float] = []
    for number in range(rounds):
        turns = [(case.bare, bare_us), (case.patched, patched_us)]
        for function, times in turns if number % 2 else reversed(turns):
            times.append(_microseconds(function) / case.calls)
    added = statistics.median(after - before for before, after in zip(bare_us, patched_us, strict=True))
    return Result(case.name, statistics.median(bare_us), statistics.median(patched_us), added, case.limit_us)


def _microseconds(function: Callable[[], None]) -> float:
    begin = time.perf_counter()
    for _ in range(BATCH):
        function()
    return (time.perf_counter() - begin) / BATCH * 1e6


def render(results: Sequence[Result], rounds: int) -> str:
    rows = [
        f"| {r.case} | {r.bare_us:.2f} | {r.patched_us:.2f} | {r.added_us:+.2f} | < {r.limit_us:g} |"
        for r in results
    ]
    return "\n".join(
        [
            "# Added cost of a call",
            "",
            f"`python -m benchmarks.bench_overhead`: {rounds} batches of {BATCH} calls each, bare and",
            "patched in turns; median of the differences, per call. Real megatron-core, one rank, "
            f"{'GPU' if torch.cuda.is_available() else 'CPU'}.",
            f"{_machine.description()}.",
            "",
            "| call | bare (µs) | patched (µs) | added (µs) | claim (µs) |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "`train()` is an empty loop: assertion, installation, and the checks that may warn. With",
            "overlapped parameter gather",
            "on several ranks, entry also includes the all-reduce of one integer, by which ranks agree",
            "whether a former call broke off. The bare `disable_forward_pre_hook` raises when the hooks are",
            "off, so it has no time there.",
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
