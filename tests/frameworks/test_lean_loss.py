"""``lean-loss`` at the sites of the frameworks, on stand-ins and real megatron-core.

Every test runs in processes of its own. Unpatched, the stand-ins keep copies of the logits, lose gradients
under reentrant checkpointing, or hang; patched, they return the same things in the same shapes, with the
values and gradients of a dense float64 reference. ``test_real_lean_loss.py`` and ``test_real_verl.py`` check
the same of the frameworks themselves.
"""

from __future__ import annotations

import importlib
import itertools
import warnings
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl_patches import apply, revert
from tests.device_thread import device_thread
from tests.frameworks.rollouts import states_of
from tests.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("stand_ins_on_the_path")

PATCH = "lean-loss"
UTILS = "slime.utils.ppo_utils"
BFLOAT16 = 4e-3  # what Megatron's fused cross entropy rounds gradients to


def check_scores(framework: str, masked: bool = False, **options: Any) -> float:
    """Compare a framework's scores and gradients with the dense ones; return the error of unpatched ones.

    ``masked``: each token was sampled from a part of the vocabulary.
    """
    from tests.frameworks.loss_jobs import LossJob, distance

    worst = 0.0
    for entropy_coef, temperature in itertools.product((0.0, 0.1), (1.0, 0.7)):
        way = {"entropy_coef": entropy_coef, "rollout_temperature": temperature, "masked": masked, **options}
        way |= {"rollout_top_p": 0.9} if masked else {}
        apply(PATCH)
        patched, deferred = (LossJob(framework, deferred=kind, **way).result() for kind in (False, True))
        assert set(states_of(framework, patch=PATCH).values()) <= {"applied", "not needed", "waiting"}
        revert(PATCH)
        job = LossJob(framework, **way)
        unpatched, dense = job.result(), job.dense(temperature)
        for run in (patched, deferred):
            assert all(distance(run[key], dense[key]) < 1e-6 for key in dense), way
            assert run["returned"] == unpatched["returned"] and not run["made"]
            assert run["requires_grad"][1] == (entropy_coef != 0)
        if masked:
            without_mask = LossJob(framework, **{**way, "masked": False}).dense(temperature)
            assert (dense["log_probs"] - without_mask["log_probs"]).abs().max() > 0.1
        else:
            assert all(distance(patched[key], unpatched[key], 1.0) < 1e-5 for key in ("log_probs", "entropy"))
        worst = max(worst, *(distance(unpatched[key], dense[key]) for key in dense))
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
                assert bool(job.args.recompute_loss_function) is (given is recomputing)
        revert(PATCH)


@pytest.mark.parametrize(("order", "tp"), [("before", 2), ("after", 1)])
@on_ranks(lambda tp: tp)
def test_values_and_gradients(order: str, tp: int) -> None:
    from tests.frameworks.loss_jobs import LOSSES, initialize

    initialize(tp=tp)
    if order == "before":
        apply(PATCH)
    homes = [importlib.import_module(name) for name in (LOSSES["slime"], UTILS)] * (order == "after")
    names = [dict(vars(home)) for home in homes]
    assert 1e-4 < check_scores("slime") < BFLOAT16
    assert [dict(vars(home)) for home in homes] == names


@on_ranks(1)
def test_policy_loss() -> None:
    from megatron.core import parallel_state

    from tests.frameworks.loss_jobs import LOSSES, LossJob, distance, initialize

    initialize()
    check_policy_loss("slime", tolerance=1e-6)
    apply(PATCH)
    recomputing, module = {"recompute_loss_function": True}, importlib.import_module(LOSSES["slime"])
    own = module.policy_loss_function
    with mock.patch.object(module, "policy_loss_function", wraps=own) as policy_loss:
        run = LossJob("slime", **recomputing).loss()
        assert policy_loss.call_count == 2
        for deferred in (False, True):
            job = LossJob("slime", deferred=deferred, **recomputing)
            with device_thread():  # where CUDA recomputes
                again = job.loss()
            assert distance(again["gradient"], run["gradient"]) < 1e-6
    assert policy_loss.call_count == 6

    # Candidates of a top-k loss are scored, too.
    logits = LossJob("slime").logits()[0].detach()
    for candidate in (3, 5, 7):
        tokens, expected = torch.full((len(logits),), candidate), logits.log_softmax(-1)[:, [candidate]]
        log_probs = importlib.import_module(UTILS).compute_log_probs(
            logits, tokens, parallel_state.get_tensor_model_parallel_group()
        )
        assert (log_probs - expected).abs().max() < 1e-6


@on_ranks(1)
def test_finite_loss_is_around_it() -> None:
    """Inside, it would keep the framework's function from being replaced."""
    from megatron_rl_patches.frameworks.response_scores import forms
    from tests.frameworks.loss_jobs import LossJob, initialize

    initialize()
    apply("finite-loss", PATCH)
    LossJob("slime").result()
    assert len(forms) == 1 and all(forms.values())


@on_ranks(2)
def test_all_gather_cp() -> None:
    from tests.frameworks.loss_jobs import LossJob, distance, initialize

    initialize(cp=2)
    layouts = ({"totals": (24,), "responses": (6,)}, {})  # in the second one each rank lacks a sample
    # Unpatched, the rank that has the response has no backward, and the other one waits for it.
    without_response = torch.distributed.get_rank() == 0
    unpatched = LossJob("slime", allgather_cp=True, **layouts[0]).result(backward=False)
    assert unpatched["requires_grad"] == [True, without_response]
    apply(PATCH)
    for layout, entropy_coef in itertools.product(layouts, (0.0, 0.1)):
        job = LossJob("slime", allgather_cp=True, entropy_coef=entropy_coef, **layout)
        result, dense = job.result(), job.dense()
        assert all(distance(result[key], dense[key]) < 1e-6 for key in dense)
        assert result["requires_grad"] == [True, entropy_coef != 0]
