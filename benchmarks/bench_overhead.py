"""The time that the patch adds to one call of `train()`, and to one call of a hook method.

    python -m benchmarks.bench_overhead [--rounds N]

One rank, real megatron-core on CPU, a tiny GPT in real DistributedDataParallel. Bare and patched calls take
turns in short batches, so that a busy machine slows down both; the result is the median of the differences.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl_patches import Settings, applied
from megatron_rl_patches.testing import cpu_backend, spawn_ranks

from . import _machine

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "overhead.md"
BATCH = 200


@dataclass(frozen=True)
class Result:
    case: str
    bare_us: float
    patched_us: float
    added_us: float
    limit_us: float | None


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
    return int(any(r.limit_us is not None and r.added_us >= r.limit_us for r in results))


def measure(rounds: int) -> list[Result]:
    settings = Settings(train_functions=("benchmarks.bench_overhead:train",))
    with cpu_backend(), applied("reentrant-train", settings=settings):
        from tests.real import tiny_gpt

        results = []
        for gather in (False, True):
            model, optimizer = tiny_gpt.build(tiny_gpt.Options(overlap_param_gather=gather))
            bare = functools.partial(_bare_train, model, optimizer)
            patched = functools.partial(train, model, optimizer)
            case = f"train(), {'with' if gather else 'without'} overlapped parameter gather"
            results.append(compare(case, bare, patched, rounds, 50.0))
        chunk = model[0]
        disable, enable = (vars(type(chunk))[f"{verb}_forward_pre_hook"] for verb in ("disable", "enable"))
        chunk.disable_forward_pre_hook(param_sync=False)
        for case, off, on in (
            ("disable + enable_forward_pre_hook", disable, enable),
            ("disable_forward_pre_hook, off already", disable, None),
        ):
            results.append(_compare_hooks(case, chunk, off, on, rounds))
        return results


def _bare_train(model: Sequence[Any], optimizer: Any) -> None:
    model[0].config.no_sync_func = None
    train.__wrapped__(model, optimizer)  # type: ignore[attr-defined]


def _compare_hooks(case: str, chunk: Any, disable: Any, enable: Any, rounds: int) -> Result:
    def bare() -> None:
        if enable:
            enable.__wrapped__(chunk)
            disable.__wrapped__(chunk, param_sync=False)

    def patched() -> None:
        if enable:
            chunk.enable_forward_pre_hook()
        chunk.disable_forward_pre_hook(param_sync=False)

    calls = 2 if enable else 1
    whole = compare(case, bare, patched, rounds, 5.0)
    return Result(case, whole.bare_us / calls, whole.patched_us / calls, whole.added_us / calls, 5.0)


def compare(
    case: str, bare: Callable[[], None], patched: Callable[[], None], rounds: int, limit_us: float | None
) -> Result:
    bare_us: list[float] = []
    patched_us: list[float] = []
    for number in range(rounds):
        turns = [(bare, bare_us), (patched, patched_us)]
        for function, times in turns if number % 2 else reversed(turns):
            times.append(_microseconds(function))
    added = statistics.median(after - before for before, after in zip(bare_us, patched_us, strict=True))
    return Result(case, statistics.median(bare_us), statistics.median(patched_us), added, limit_us)


def _microseconds(function: Callable[[], None]) -> float:
    begin = time.perf_counter()
    for _ in range(BATCH):
        function()
    return (time.perf_counter() - begin) / BATCH * 1e6


def render(results: Sequence[Result], rounds: int) -> str:
    rows = [
        f"| {r.case} | {r.bare_us:.2f} | {r.patched_us:.2f} | {r.added_us:+.2f} "
        f"| {'' if r.limit_us is None else f'< {r.limit_us:g}'} |"
        for r in results
    ]
    return "\n".join(
        [
            "# Added cost of a call",
            "",
            f"`python -m benchmarks.bench_overhead`: {rounds} batches of {BATCH} calls each, bare and",
            "patched in turns; median of the differences, per call. Real megatron-core, one rank, CPU.",
            f"{_machine.description()}.",
            "",
            "| call | bare (µs) | patched (µs) | added (µs) | claim (µs) |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "`train()` is an empty loop: assertion and installation only. With overlapped parameter gather",
            "on several ranks, entry also includes the all-reduce of one integer, by which ranks agree",
            "whether a former call broke off. The bare `disable_forward_pre_hook` raises when the hooks are",
            "off, so it has no time there.",
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
