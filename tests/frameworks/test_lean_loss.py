"""``lean-loss`` at the sites of the frameworks, on stand-ins and real megatron-core.

Every test runs in processes of its own. Unpatched, the stand-ins keep copies of the logits, lose gradients
under reentrant checkpointing, or hang; patched, they return the same things in the same shapes, with the
values and gradients of a dense float64 reference. ``test_real_lean_loss.py`` and ``test_real_verl.py`` check
the same of the frameworks themselves.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl_patches import apply, revert
from tests.device_thread import device_thread
from tests.frameworks.rollouts import states_of
from tests.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("miles_on_the_path")

PATCH = "lean-loss"
slow = pytest.mark.slow
BFLOAT16 = 4e-3  # what Megatron's fused cross entropy rounds gradients to


def check_scores(framework: str, **options: Any) -> float:
    """Compare a framework's scores and gradients with the dense ones; return the error of unpatched ones."""
    from tests.frameworks.loss_jobs import LossJob, distance

    worst = 0.0
    for entropy_coef in (0.0, 0.1):
        for temperature in (1.0, 0.7):
            both = {"entropy_coef": entropy_coef, "rollout_temperature": temperature, **options}
            job = LossJob(framework, **both)
            apply(PATCH)
            patched = job.result()
            deferred = LossJob(framework, deferred=True, **both).result()
            assert set(states_of(framework, patch=PATCH).values()) <= {"applied", "not needed", "waiting"}
            revert(PATCH)
            unpatched = job.result()
            dense = job.dense(temperature)
            for run in (patched, deferred):
                assert all(distance(run[key], dense[key]) < 1e-6 for key in dense)
            for key in ("log_probs", "entropy"):
                assert distance(patched[key], unpatched[key], 1.0) < 1e-5
            worst = max(worst, *(distance(unpatched[key], dense[key]) for key in dense))
            assert not deferred["made"]
            assert patched["returned"] == unpatched["returned"]
            assert patched["requires_grad"][1] == (entropy_coef != 0)
            assert job.args.rollout_temperature == temperature
    return worst


def check_policy_loss(framework: str, tolerance: float = 1e-5, **options: Any) -> None:
    """Compare a framework's policy loss and its gradient with the dense ones, recomputed or not."""
    from tests.frameworks.loss_jobs import LossJob, distance

    for entropy_coef in (0.0, 0.1):
        options["entropy_coef"] = entropy_coef
        recomputing = {**options, "recompute_loss_function": True}
        dense = LossJob(framework, **options).loss(dense=True)
        unpatched = LossJob(framework, **options).loss()
        assert distance(unpatched["loss"], dense["loss"]) < 1e-5
        assert distance(unpatched["gradient"], dense["gradient"]) < BFLOAT16
        with warnings.catch_warnings(action="ignore"):  # that use_reentrant is not given
            assert LossJob(framework, **recomputing).loss()["returned"] == unpatched["returned"]
        apply(PATCH)
        for deferred in (False, True):
            for given in (options, recomputing):
                job = LossJob(framework, deferred=deferred, **given)
                run = job.loss()
                assert not run["made"]
                assert run["returned"] == unpatched["returned"]
                assert max(distance(run[key], dense[key]) for key in ("loss", "gradient")) < tolerance
                for key, value in dense["metrics"].items():
                    assert abs(run["metrics"][key] - value) < 1e-5
                assert job.args.recompute_loss_function == given.get("recompute_loss_function", False)
        revert(PATCH)


@pytest.mark.parametrize(("framework", "order", "tp"), [("slime", "before", 2), ("miles", "after", 1)])
@on_ranks(lambda tp: tp)
def test_values_and_gradients(framework: str, order: str, tp: int) -> None:
    from tests.frameworks.loss_jobs import LOSSES, SCORES, initialize

    initialize(tp=tp)
    if order == "before":
        apply(PATCH)
    homes = [importlib.import_module(home[framework]) for home in (SCORES, LOSSES)] * (order == "after")
    names = [dict(vars(home)) for home in homes]
    assert 1e-4 < check_scores(framework) < BFLOAT16
    assert [dict(vars(home)) for home in homes] == names


@pytest.mark.parametrize("framework", [pytest.param("slime", marks=slow), "miles"])
@on_ranks(1)
def test_policy_loss(framework: str) -> None:
    from tests.frameworks.loss_jobs import LOSSES, LossJob, distance, initialize

    initialize()
    check_policy_loss(framework, tolerance=1e-6)
    apply(PATCH)
    recomputing, module = {"recompute_loss_function": True}, importlib.import_module(LOSSES[framework])
    own = module.policy_loss_function
    with mock.patch.object(module, "policy_loss_function", wraps=own) as policy_loss:
        run = LossJob(framework, **recomputing).loss()
        assert policy_loss.call_count == 2
        for deferred in (False, True):
            job = LossJob(framework, deferred=deferred, **recomputing)
            with device_thread():  # where CUDA recomputes
                again = job.loss()
            assert distance(again["gradient"], run["gradient"]) < 1e-6
    assert policy_loss.call_count == 6


@slow
@on_ranks(1)
def test_what_neither_slices_nor_scores_as_others_do() -> None:
    """miles keeps the bits of its engine; slime scores candidates of a top-k loss."""
    from megatron.core import parallel_state

    from tests.frameworks.loss_jobs import LossJob, initialize

    initialize()
    job = LossJob("miles", entropy_coef=0.1, rollout_temperature=0.7, true_on_policy_mode=True)
    unpatched = job.result()
    apply(PATCH)
    patched = job.result()
    assert all((patched[key] == unpatched[key]).all() for key in ("log_probs", "entropy", "gradient"))

    from slime.utils.ppo_utils import compute_log_probs

    logits = LossJob("slime").logits()[0].detach()
    expected = logits.log_softmax(-1)
    group = parallel_state.get_tensor_model_parallel_group()
    for candidate in (3, 5, 7):
        log_probs = compute_log_probs(logits, torch.full((len(logits),), candidate), group)
        assert (log_probs - expected[:, [candidate]]).abs().max() < 1e-6


def _redistributed(backward: bool) -> dict[tuple[int, float], list[bool]]:
    """Return by number of samples and entropy coefficient which values require grad on this rank."""
    from tests.frameworks.loss_jobs import LossJob, distance

    requires_grad = {}
    # In the first layout one rank has the whole response, in the second each lacks one of the samples.
    for layout in ({"totals": (24,), "responses": (6,)}, {}):
        for entropy_coef in (0.0, 0.1):
            job = LossJob("miles", allgather_cp=True, entropy_coef=entropy_coef, **layout)
            # The caller says whether the entropy is a metric.
            result = job.result(backward, entropy_requires_grad=entropy_coef != 0)
            requires_grad[len(job.totals), entropy_coef] = result["requires_grad"]
            if backward:
                dense = job.dense()
                assert all(distance(result[key], dense[key]) < 1e-6 for key in dense)
    return requires_grad


@on_ranks(2)
def test_all_gather_cp() -> None:
    from tests.frameworks.loss_jobs import initialize

    initialize(cp=2)
    # Unpatched, the rank that has the response has no backward, and the other one waits for it.
    without_response = torch.distributed.get_rank() == 0
    assert _redistributed(backward=False)[1, 0.0] == [True, without_response]
    apply(PATCH)
    for (_, entropy_coef), requires_grad in _redistributed(backward=True).items():
        assert requires_grad == [True, entropy_coef != 0]
