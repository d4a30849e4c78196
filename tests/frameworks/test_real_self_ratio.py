"""``self-ratio`` in the training loop of unmodified checkouts, whose own ``forward_only`` scores.

A run whose passes differ in one thing is warned of, with its cause; the same run without it is silent, and
ends at the same weights as without the patch.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest

from megatron_rl_patches import applied
from megatron_rl_patches.errors import LogProbsDiffer
from megatron_rl_patches.frameworks import own_options, self_ratio
from tests.frameworks.import_stubs import job_of
from tests.ranks import on_ranks

PATCH = "self-ratio"


def rollouts(job: Any, number: int = 1, **scoring: Any) -> list[str]:
    """Score and train; return the messages that are logged. Arguments are other ones while scoring."""
    with mock.patch.object(type(self_ratio._OFF), "log") as log:
        for _ in range(number):
            with mock.patch.multiple(job.args, **scoring) if scoring else nullcontext():
                scored = job.log_probs()
            rollout = job._rollout_data
            with mock.patch.object(job, "_rollout_data", lambda n: rollout(n) | {"log_probs": scored}):
                job.train(1)
    return [self_ratio._OFF.text(**call.kwargs) for call in log.call_args_list if "causes" in call.kwargs]


@pytest.mark.frameworks
@pytest.mark.slow
@pytest.mark.parametrize("framework", ["slime", "miles"])
@on_ranks(1, timeout=400)
def test_slime_and_miles(framework: str, paths: list[str]) -> None:
    job_type = job_of(framework, paths)
    from tests.frameworks.real_jobs import POLICY

    for name, flags, scoring, in (
        ("clean", {}, {}),
        ("dropout", {"hidden_dropout": .1}, {}),
        ("temp", {}, {"rollout_temperature": .7}),
    ):
        own_options.clear()
        job = job_type({**POLICY, **flags})
        with applied("reentrant-train", PATCH):
            print(name, rollouts(job, 2, **scoring), own_options)
    assert 0
