"""Code that is newer than the checkouts on record: stand-ins that have its shape, written from its threads.

miles moved its losses in September 2026, and scores tokens over what they were sampled from
(radixark/miles#2200, #2595). A kernel may do the work of ``lean-loss`` there, and in slime (THUDM/slime#2383).
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl_patches import applied, revert, status
from megatron_rl_patches.engine.judge import judge_all
from megatron_rl_patches.engine import registry
from megatron_rl_patches.engine.sources import open_source
from megatron_rl_patches import Settings
from tests.frameworks.conftest import STAND_INS
from tests.frameworks.test_lean_loss import BFLOAT16
from tests.ranks import on_ranks

PATCH = "lean-loss"
MILES = "miles.backends.training_utils"
#: What moved: name of the function -> its modules before and after.
MOVED = {
    "loss_function": ("loss", "loss.objective"),
    "get_log_probs_and_entropy": ("loss_hub.logit_processors", "loss.hub.logit_processors"),
    "calculate_log_probs_and_entropy": ("loss_hub.math_utils", "loss.hub.math_utils"),
    "allgather_cp_redistribute": ("cp_utils", "data.context_parallel"),
}
LAYOUTS = [
    pytest.param(2, {"tp": 2}, id="TP 2"),
    pytest.param(1, {}, id="1 rank", marks=pytest.mark.slow),
    pytest.param(2, {"cp": 2}, id="zigzag CP 2", marks=pytest.mark.slow),
    pytest.param(2, {"cp": 2, "allgather_cp": True}, id="all-gather CP 2", marks=pytest.mark.slow),
]


def check_masks(framework: str, **options: Any) -> float:
    """Compare scores over what tokens were sampled from with dense ones; return the error of unpatched ones."""
    from tests.frameworks.loss_jobs import LossJob, distance

    worst = 0.0
    for entropy_coef, temperature in itertools.product((0.0, 0.1), (1.0, 0.7)):
        way = {
            "entropy_coef": entropy_coef,
            "rollout_temperature": temperature,
            "rollout_top_p": 0.9,
            **options,
        }
        job = LossJob(framework, masked=True, **way)
        unpatched, dense = job.result(), job.dense(temperature)
        assert (dense["log_probs"] - LossJob(framework).dense(temperature)["log_probs"]).abs().max() > 0.1
        with applied(PATCH):
            for deferred in (False, True):
                run = LossJob(framework, masked=True, deferred=deferred, **way).result()
                assert all(distance(run[key], dense[key]) < 1e-6 for key in dense), way
                assert run["returned"] == unpatched["returned"] and not run["made"]
        worst = max(worst, *(distance(unpatched[key], dense[key]) for key in dense))
    return worst


@pytest.mark.usefixtures("newest_miles_on_the_path")
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
@on_ranks(lambda ranks: ranks)
def test_tokens_that_were_sampled_from_a_part_of_the_vocabulary(ranks: int, layout: dict[str, Any]) -> None:
    from tests.frameworks import loss_jobs

    framework, options = loss_jobs.NEWEST_MILES, {k: v for k, v in layout.items() if k == "allgather_cp"}
    loss_jobs.initialize(tp=layout.get("tp", 1), cp=layout.get("cp", 1))
    assert 1e-4 < check_masks(framework, **options) < BFLOAT16
