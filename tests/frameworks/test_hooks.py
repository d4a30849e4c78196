"""``megatron_rl_patches.hooks`` on stand-ins whose functions have been copied already, as in a worker."""

from __future__ import annotations

import os
from unittest import mock

import pytest

from megatron_rl_patches import status
from megatron_rl_patches.hooks import on_megatron_init, switch_on
from tests.frameworks.rollouts import FINE, NO_SYNC, outcome
from tests.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("stand_ins_on_the_path")


def _applied(framework: str, **variables: str) -> tuple[set[str], list[str]]:
    """Return the patches that the hook has applied, and what becomes of two rollouts and a save after it."""
    from tests.frameworks.jobs import JOBS

    os.environ.pop("MEGATRON_RL_PATCHES", None)
    job = JOBS[framework]()  # the actor holds copies of train() and save()
    assert outcome(job.train) == FINE
    assert outcome(job.train).startswith(NO_SYNC)
    with mock.patch.dict(os.environ, variables):
        on_megatron_init(job.args)
    job = JOBS[framework]()
    patches = {site.patch for site in status() if site.state == "applied"}
    return patches, [outcome(job.train), outcome(job.train), outcome(job.save)]


@pytest.mark.parametrize("framework", ["slime", "miles"])
@on_ranks(1)
def test_without_a_variable(framework: str) -> None:
    patches, outcomes = _applied(framework)
    assert patches >= {"reentrant-train", "inference-only", "lean-head"}
    assert outcomes == [FINE] * 3


@pytest.mark.parametrize(("value", "patches"), [("lean-head", {"lean-head"}), ("0", set())])
@on_ranks(1)
def test_the_variable_decides_where_it_is_set(value: str, patches: set[str]) -> None:
    applied, outcomes = _applied("slime", MEGATRON_RL_PATCHES=value)
    assert applied == patches
    assert outcomes[1].startswith(NO_SYNC)


@on_ranks(1, megatron=False)
def test_a_bad_option_costs_its_value_alone() -> None:
    with mock.patch.dict(os.environ, MEGATRON_RL_PATCHES_WARN="maybe"):
        switch_on()
    assert "applied" in {site.state for site in status()}
