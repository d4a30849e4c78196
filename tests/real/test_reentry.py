"""``reentrant-train`` on real megatron-core: rollouts through several calls equal one uninterrupted run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from megatron_rl_patches import Settings, applied
from megatron_rl_patches.testing import cpu_backend, spawn_ranks

pytestmark = pytest.mark.runs("re-entry", ranks=[1, 2])

ROLLOUTS, STEPS, MICROBATCHES = 4, 2, 2
SETTINGS = Settings(train_functions=("tests.real.tiny_gpt:train",))

SLOW = pytest.mark.slow
LAYOUTS = [
    pytest.param(1, {}, id="1 rank"),
    pytest.param(2, {}, id="DP 2"),
    pytest.param(2, {"tp": 2}, id="TP 2", marks=SLOW),
    pytest.param(2, {"pp": 2}, id="PP 2", marks=SLOW),
    pytest.param(2, {"pp": 2, "vpp": 2}, id="PP 2, VPP 2", marks=SLOW),
    pytest.param(2, {"cp": 2}, id="CP 2", marks=SLOW),
]


@dataclass
class Run:
    """What one rank reports of a run."""

    losses: list[float]
    checksum: str
    error: str = ""
    gathers_from_hooks: int = 0
    reduces_from_hooks: int = 0


def _rollouts(options: Any, rollouts: int, steps: int) -> Run:
    from tests.real import tiny_gpt

    model, optimizer = tiny_gpt.build(options)
    data = tiny_gpt.data_iterators(options)
    run = Run([], "")
    with tiny_gpt.counting_overlap() as overlap:
        try:
            for _ in range(rollouts):
                run.losses += tiny_gpt.train(model, optimizer, data, [MICROBATCHES] * steps, options)
        except (AssertionError, KeyError) as error:
            run.error = f"{type(error).__name__}: {error}"
    run.checksum = tiny_gpt.checksum(model, optimizer)
    run.gathers_from_hooks = overlap.param_gathers
    run.reduces_from_hooks = overlap.grad_reduces + overlap.scheduled_grad_reduces
    return run


def _compare(layout: dict[str, Any]) -> dict[str, Run]:
    with cpu_backend():
        from tests.real.tiny_gpt import Options, Parallelism

        options = Options(parallelism=Parallelism(**layout))
        runs = {
            "uninterrupted": _rollouts(options, 1, ROLLOUTS * STEPS),
            "unpatched": _rollouts(options, ROLLOUTS, STEPS),
        }
        with applied("reentrant-train", settings=SETTINGS):
            runs["patched"] = _rollouts(options, ROLLOUTS, STEPS)
        return runs


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_rollouts_equal_one_uninterrupted_run(ranks: int, layout: dict[str, Any]) -> None:
    for runs in spawn_ranks(_compare, ranks, layout, timeout=120):
        assert runs["unpatched"].error.startswith("AssertionError: When overlap_grad_reduce is True")
        assert len(runs["unpatched"].losses) == STEPS
        assert runs["patched"].error == ""
        assert runs["patched"].losses == runs["uninterrupted"].losses
        assert runs["patched"].checksum == runs["uninterrupted"].checksum
        assert runs["patched"].gathers_from_hooks > 0
        assert runs["patched"].reduces_from_hooks > 0
