"""``finite-loss`` on unmodified checkouts of slime and OpenClaw-RL, as in ``test_real_lean_loss.py``."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from megatron_rl_patches import applied
from tests.frameworks.import_stubs import EAGER, prepare
from tests.frameworks.test_finite_loss import (
    LOSSES,
    PATCH,
    SPOILT,
    check_counted_tokens,
    check_masked_tokens,
    check_policy,
    check_value_loss,
)
from tests.frameworks.test_real_lean_loss import _initialize
from tests.ranks import on_ranks

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.slow,
    pytest.mark.parametrize("framework", ["slime", "vime"]),
]


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, {}, id="1 rank"),
        pytest.param(1, {"recompute_loss_function": True, "calculate_per_token_loss": True}, id="recomputed"),
        pytest.param(2, {"tp": 2}, id="TP 2"),
        pytest.param(2, {"cp": 2}, id="zigzag CP 2"),
        pytest.param(2, {"cp": 2, "allgather_cp": True}, id="all-gather CP 2"),
    ],
)
@on_ranks(lambda ranks: ranks, timeout=400, env=EAGER)
def test_tokens(framework: str, ranks: int, layout: dict[str, Any], paths: list[str]) -> None:
    options = _initialize(framework, paths, layout)
    with warnings.catch_warnings(action="ignore"):  # that use_reentrant is not given
        assert check_masked_tokens(framework, **options) > 10
        for with_lean_loss in (False, True):
            check_policy(framework, with_lean_loss, **options)
        check_counted_tokens(framework, **options)
        if layout == {}:
            assert check_masked_tokens(framework, spoilt_by=SPOILT) > 50
            check_value_loss(framework)


@on_ranks(1, timeout=400, env=EAGER)
def test_with_other_patches(framework: str, paths: list[str]) -> None:
    """``lean-loss`` and deferred logits, in either order of application."""
    _initialize(framework, paths, {})
    with warnings.catch_warnings(action="ignore"), applied("lean-loss"):
        for deferred in (False, True):
            assert check_masked_tokens(framework, deferred=deferred, recompute_loss_function=True) > 10
            check_counted_tokens(framework, deferred=deferred)
    with applied(PATCH), applied("lean-loss"):
        check_policy(framework, True, deferred=True)


@on_ranks(1, timeout=400, env=EAGER)
def test_no_step_is_skipped(framework: str, paths: list[str]) -> None:
    """``finite-step`` alone skips each step that a masked infinite ratio spoils; with both, it skips none.

    The weights are those of clean rollouts with and without the patch, deferred logits included.
    """
    prepare(paths)
    from tests.frameworks.real_jobs import JOBS

    class Job(JOBS[framework]):  # type: ignore[misc]
        old_log_prob = -4.0  # of the masked tokens

        def _rollout_data(self, samples: int) -> dict[str, Any]:
            rollout: dict[str, Any] = super()._rollout_data(samples)
            rollout["ref_log_probs"] = rollout["log_probs"]
            old = self.old_log_prob
            for name, value in (("loss_masks", 0), ("log_probs", old), ("ref_log_probs", -old)):
                rollout[name] = [values.clone() for values in rollout[name]]
                for values in rollout[name]:
                    values[1] = value
            return rollout

    def trained(*patches: str, old_log_prob: float = -4.0) -> tuple[str, int]:
        """Return a checksum of weights and moments, and how many samples the schedule has seen."""
        with applied("reentrant-train", "finite-step", *patches):
            job = Job()
            job.use_policy_loss()
            vars(job.args).update(use_kl_loss=True, kl_loss_coef=0.0, kl_loss_type="low_var_kl")
            job.old_log_prob = old_log_prob
            for chunk in job.model:
                chunk.ddp_config.check_for_nan_in_grad = False
            for steps in (1, 2):
                job.train(steps)
            return job.checksum(), job.scheduler.num_steps

    for others in ((), ("lean-loss", "lean-head")):
        clean = trained(*others)
        assert clean[1] > 0 == trained(*others, old_log_prob=-1e3)[1]
        assert trained(*others, PATCH) == clean == trained(*others, PATCH, old_log_prob=-1e3)


@on_ranks(1, timeout=400)
def test_compiled(framework: str, paths: list[str]) -> None:
    """slime compiles the functions of which two are patched."""
    _initialize(framework, paths, {})
    losses = {name: LOSSES[name] for name in ("low_var_kl", "unbiased k3")}
    assert check_masked_tokens(framework, losses) > 5
    check_counted_tokens(framework, losses)
