"""``self-ratio`` in the training loops of unmodified checkouts, and of verl's package, which score before.

A run whose passes differ in one thing is warned of, with its cause. The run without it is silent, and ends at
the same weights as without the patch.
"""

from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl_patches import applied
from megatron_rl_patches.frameworks import own_options, self_ratio
from megatron_rl_patches.reentry import SelfRatio
from tests.frameworks.import_stubs import job_of, prepare
from tests.frameworks.rollouts import LOCAL, TRANSFORMER_ENGINE
from tests.frameworks.test_self_ratio import PATCH, warnings_of
from tests.ranks import everywhere, on_ranks

pytestmark = pytest.mark.slow


def rollouts(job: Any, **scoring: Any) -> None:
    """Score and train twice, with other arguments while scoring."""
    own = job._rollout_data
    for _ in range(2):
        with mock.patch.multiple(job.args, **scoring) if scoring else nullcontext():
            scored = {"log_probs": job.log_probs()}
        with mock.patch.object(job, "_rollout_data", lambda n, scored=scored: own(n) | scored):
            job.train(1)


@pytest.mark.frameworks
@pytest.mark.parametrize(("layers", "layout"), [(LOCAL, {}), (TRANSFORMER_ENGINE, {"tp": 2})])
@pytest.mark.parametrize("framework", ["slime", "miles"])
@on_ranks(lambda layout: 2 if layout else 1, timeout=400)
def test_slime_and_miles(framework: str, layers: str, layout: dict[str, int], paths: list[str]) -> None:
    job_type = job_of(framework, paths)
    from tests.frameworks.real_jobs import POLICY

    def job(**flags: Any) -> Any:
        return job_type(POLICY | flags, layers=layers, **layout)

    clean, unpatched = job(), job()
    assert warnings_of(lambda: rollouts(clean)) == []
    assert own_options[PATCH].startswith("fine: 0 nats on average and 0 at most")
    with applied(exclude=[PATCH]):
        rollouts(unpatched)
    assert clean.checksum() == unpatched.checksum()

    for flags, scoring, cause in (
        ({"hidden_dropout": 0.1}, {}, "dropout, at a rate of 0.1"),
        ({}, {"rollout_temperature": 0.7}, "temperature, 0."),
    ):
        reports = warnings_of(partial(rollouts, job(**flags), **scoring))
        # One of the tensor-parallel ranks warns, once.
        [report] = chain.from_iterable(everywhere(reports))
        assert f"what fits: {cause}" in report


@pytest.mark.frameworks
@pytest.mark.parametrize("framework", ["slime", "miles"])
@on_ranks(2, timeout=400)
def test_context_parallelism(framework: str, paths: list[str]) -> None:
    """Each rank compares its part, of old log-probs that differ by up to 0.15 from those of the policy."""
    prepare(paths)
    from tests.frameworks.loss_jobs import RESPONSES, LossJob, initialize

    initialize(cp=2)
    job, ratio = LossJob(framework), SelfRatio()
    batch = job.batch()
    batch["loss_masks"][1][0] = 0
    with applied(), self_ratio._step.enter(ratio):
        job.loss(batch=batch)
    reports = everywhere(ratio.report())
    assert sum(report.tokens for report in reports) == sum(RESPONSES) - 1
    assert max(report.largest for report in reports) == pytest.approx(0.15, abs=1e-5)


@on_ranks(1, timeout=400)
def test_verl(verl: list[str]) -> None:
    prepare(verl)
    from tests.frameworks.verl_jobs import EngineJob

    clean, unpatched = EngineJob(), EngineJob()
    assert warnings_of(lambda: [clean.update(clean.scored()) for _ in range(2)]) == []
    assert own_options[PATCH].startswith("fine: 0 nats on average and 0 at most")
    with applied(exclude=[PATCH]):
        for _ in range(2):
            unpatched.update(unpatched.scored())
    assert all(map(torch.equal, clean.weights(), unpatched.weights()))

    job = EngineJob(config={"hidden_dropout": 0.1})
    reports = warnings_of(lambda: [job.update(job.scored()) for _ in range(2)], every=True)
    assert len(reports) == 2 and all("dropout, at a rate of 0.1" in report for report in reports)
    # As in bypass_mode: the worker has not scored.
    assert warnings_of(lambda: job.update()) == [] and PATCH not in own_options
    [report] = warnings_of(lambda: clean.update(clean.scored(temperature=1.0)))
    assert "what fits: temperature" in report
