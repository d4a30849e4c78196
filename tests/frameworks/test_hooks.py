"""``megatron_rl_patches.hooks`` on stand-ins whose functions have been copied already, as in a worker."""

from __future__ import annotations

import os
from unittest import mock

import pytest

from megatron_rl_patches import status
from megatron_rl_patches.engine.settings import VARIABLE
from megatron_rl_patches.hooks import on_megatron_init, switch_on
from tests.frameworks.rollouts import FINE, NO_SYNC, outcome
from tests.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("stand_ins_on_the_path")


@pytest.mark.parametrize(
    ("framework", "value", "patches"),
    [
        ("slime", None, {"reentrant-train", "inference-only", "lean-head"}),
        ("miles", None, {"reentrant-train", "inference-only", "lean-head"}),
        ("slime", "lean-head", {"lean-head"}),
        ("slime", "0", set()),
    ],
)
@on_ranks(1)
def test_the_variable_decides_where_it_is_set(framework: str, value: str | None, patches: set[str]) -> None:
    from tests.frameworks.jobs import JOBS

    os.environ.pop(VARIABLE, None)
    job = JOBS[framework]()  # the actor holds copies of train() and save()
    assert outcome(job.train) == FINE
    assert outcome(job.train).startswith(NO_SYNC)
    with mock.patch.dict(os.environ, {VARIABLE: value} if value else {}):
        on_megatron_init(job.args)
    job = JOBS[framework]()
    applied = {site.patch for site in status() if site.state == "applied"}
    assert applied >= patches if value is None else applied == patches
    outcomes = [outcome(job.train), outcome(job.train), outcome(job.save)]
    assert outcomes == [FINE] * 3 if "reentrant-train" in patches else outcomes[1].startswith(NO_SYNC)


@on_ranks(1, megatron=False)
def test_a_bad_option_costs_its_value_alone() -> None:
    with mock.patch.dict(os.environ, MEGATRON_RL_PATCHES_WARN="maybe"):
        switch_on()
    assert "applied" in {site.state for site in status()}
