"""``megatron_rl_patches.hooks`` on stand-ins whose functions have been copied already, as in a worker."""

from __future__ import annotations

import os
from typing import Any

import pytest

from megatron_rl_patches import status
from megatron_rl_patches.testing import cpu_backend, spawn_ranks
from tests.frameworks.test_reentry import FINE, NO_SYNC, outcome

pytestmark = pytest.mark.usefixtures("stand_ins_on_the_path")


def _rollouts(framework: str, value: str | None) -> dict[str, Any]:
    os.environ.pop("MEGATRON_RL_PATCHES", None)
    with cpu_backend():
        from megatron_rl_patches.hooks import on_megatron_init
        from tests.frameworks.jobs import JOBS

        job = JOBS[framework]()  # the actor holds copies of train() and save()
        seen: dict[str, Any] = {"before": [outcome(job.train), outcome(job.train)]}
        if value is not None:
            os.environ["MEGATRON_RL_PATCHES"] = value
        on_megatron_init(job.args)
        seen["applied"] = {site.patch for site in status() if site.state == "applied"}
        job = JOBS[framework]()
        seen["after"] = [outcome(job.train), outcome(job.train), outcome(job.save)]
        return seen


@pytest.mark.parametrize("framework", ["slime", "vime", "miles"])
def test_without_a_variable(framework: str) -> None:
    [seen] = spawn_ranks(_rollouts, 1, framework, None)
    assert seen["before"][0] == FINE
    assert seen["before"][1].startswith(NO_SYNC)
    assert seen["applied"] >= {"reentrant-train", "inference-only", "lean-head"}
    assert seen["after"] == [FINE] * 3


def _with_a_bad_option() -> set[str]:
    os.environ.update(MEGATRON_RL_PATCHES_WARN="maybe")
    from megatron_rl_patches.hooks import switch_on

    switch_on()
    return {site.state for site in status()}


def test_a_bad_option_costs_its_value_alone() -> None:
    [states] = spawn_ranks(_with_a_bad_option, 1)
    assert "applied" in states


@pytest.mark.parametrize(("value", "applied"), [("lean-head", {"lean-head"}), ("0", set())])
def test_the_variable_decides_where_it_is_set(value: str, applied: set[str]) -> None:
    [seen] = spawn_ranks(_rollouts, 1, "slime", value)
    assert seen["applied"] == applied
    assert seen["after"][1].startswith(NO_SYNC)
