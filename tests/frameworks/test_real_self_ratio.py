"""``self-ratio`` in the training loops of unmodified checkouts, and of verl's package, which score before.

A run whose passes differ in one thing is warned of, with its cause. The run without it is silent, and ends at
the same weights as without the patch.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl_patches import applied
from megatron_rl_patches.common.chunks import attribute_of
from megatron_rl_patches.frameworks import own_options, self_ratio
from megatron_rl_patches.reentry import SelfRatio
from megatron_rl_patches.testing import TinyModel
from tests.frameworks.import_stubs import job_of, prepare
from tests.frameworks.rollouts import LOCAL, TRANSFORMER_ENGINE
from tests.frameworks.test_real_router_replay import make_job
from tests.frameworks.test_self_ratio import PATCH, warnings_of
from tests.ranks import everywhere, on_ranks

pytestmark = pytest.mark.slow

Context = Callable[[Any], AbstractContextManager[Any]]  # in which a job scores
PADDED, LARGE = 40, {"init_method_std": 0.3}
SPARSE = {**LARGE, "multi_latent_attention": True, "spec": "tests.frameworks.real_jobs sparse_layers"}


def rollouts(job: Any, scoring: Context = nullcontext) -> None:
    """Score and train twice."""
    own = job._rollout_data
    for _ in range(2):
        with scoring(job):
            scored = {"log_probs": job.log_probs()}
        with mock.patch.object(job, "_rollout_data", lambda n, scored=scored: own(n) | scored):
            job.train(1)


def other(name: str, value: Any) -> Context:
    """Return where the job, its arguments or one of its modules has another value of an attribute."""

    def context(job: Any) -> AbstractContextManager[Any]:
        owners = job, getattr(job, "args", None), *job.model[0].modules()
        return mock.patch.object(next(owner for owner in owners if hasattr(owner, name)), name, value)

    return context


def other_head(change: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> Context:
    """Return where logits are those of ``change(head, states, logits)``."""
    return lambda job: attribute_of(job.model[0], "output_layer").register_forward_hook(
        lambda head, inputs, output: (change(head, inputs[0], output[0]), None)
    )


PADDING = torch.arange(TinyModel.vocab_size, PADDED)
MASKED = other_head(lambda _, __, logits: logits.index_fill(-1, PADDING, -1e4))
EXACT = other_head(lambda head, states, _: states.float() @ head.weight.float().T)


@contextmanager
def routes_of_rollout(job: Any, trains: str = "1") -> Iterator[None]:
    """Score with the routes of a rollout; ``trains`` is 1 if training has them, too."""
    replays = [each.routing_replay for each in job.model[0].modules() if hasattr(each, "routing_replay")]
    replays[0].clear_all()
    for each in replays:
        each.top_indices_list = [torch.arange(2).expand(16, 2)] * 2
    os.environ.update(ENABLE_ROUTING_REPLAY="1", ROUTING_REPLAY_STAGE="replay_forward")
    yield
    replays[0].clear_all_forward()
    os.environ.update(ENABLE_ROUTING_REPLAY=trains, ROUTING_REPLAY_STAGE="replay_backward")


def check(cause: str, run: Callable[[Context], object], *contexts: Context) -> None:
    """Check that a run is silent in all contexts but the last, where it is warned of with its cause."""
    limit = 0.001 if "head" in cause else 0.1
    *silent, reports = (warnings_of(partial(run, context), limit=limit) for context in contexts)
    [report] = chain.from_iterable(everywhere(reports))  # one of the tensor-parallel ranks warns, once
    assert f"what fits: {cause}" in report and not any(silent)


@pytest.mark.frameworks
@pytest.mark.runs("self-ratio", ranks=[1, 2])
@pytest.mark.parametrize(("layers", "layout"), [(LOCAL, {}), (TRANSFORMER_ENGINE, {"tp": 2})])
@pytest.mark.parametrize("framework", ["slime", "miles"])
@on_ranks(lambda layout: 2 if layout else 1, timeout=400)
def test_slime_and_miles(framework: str, layers: str, layout: Any, tmp_path: Any, paths: list[str]) -> None:
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

    check("dropout, at a rate of 0.1", partial(rollouts, job(hidden_dropout=0.1)), nullcontext)
    check("temperature, 0.", partial(rollouts, job()), nullcontext, other("rollout_temperature", 0.7))
    if layers == TRANSFORMER_ENGINE:
        return
    for cause, flags, scoring in (
        ("padded vocabulary, of 40 logits", {"make_vocab_size_divisible_by": PADDED}, MASKED),
        ("precision of the head", LARGE, EXACT),
        ("changed packing", LARGE, other("packed", 2)),
        ("sparse attention to the top 4", SPARSE, other("index_topk", 99)),
    ):
        check(cause, partial(rollouts, job(**flags)), nullcontext, scoring)
    if framework == "slime":
        unmasked, other_routes = other("rollout_top_p", 1.0), partial(routes_of_rollout, trains="0")
        check("mask of top-p", partial(rollouts, job(rollout_top_p=0.9)), nullcontext, unmasked)
        os.environ.update(ENABLE_ROUTING_REPLAY="1", ROUTING_REPLAY_STAGE="fallthrough")
        routed, _ = make_job(job_type, tmp_path, **POLICY, **LARGE)
        check("router replay", partial(rollouts, routed), routes_of_rollout, other_routes)


@pytest.mark.frameworks
@pytest.mark.runs("self-ratio", ranks=2)
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


@pytest.mark.runs("self-ratio", ranks=1)
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

    moe = {"kind": "moe", "config": LARGE | {"enable_routing_replay": True}}
    replay = "actor_rollout_ref.actor.megatron.router_replay.mode=R3"
    packed = other("request", {"micro_batch_size_per_gpu": 2})
    for cause, job, scoring in (
        ("padded vocabulary, of 40 logits", EngineJob(vocab_size=PADDED), MASKED),
        ("precision of the head", EngineJob(config=LARGE), EXACT),
        ("changed packing", EngineJob(config=LARGE, seq_length=32), packed),
        ("router replay", EngineJob(replay, **moe), other("request", {"enable_routing_replay": False})),
    ):
        run = lambda scoring, job=job: job.update(job.scored(scoring=scoring))  # noqa: E731
        check(cause, run, nullcontext, scoring)
