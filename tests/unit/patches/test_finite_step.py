"""Where ``finite-step`` has work to do."""

from __future__ import annotations

import pytest

from megatron_rl_patches.patches.finite_step import patch

from .judging import assert_judged

CHAINED = "megatron.core.optimizer.optimizer.ChainedOptimizer.step"
SLIME = "slime.backends.megatron_utils.model.train_one_step"
TRAIN_STEP = "train_one_step(args, model, optimizer, opt_param_scheduler)"
VERL = "verl.workers.engine.megatron.transformer_impl.MegatronEngine.optimizer_step"
NEMO_RL = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorkerImpl.train"


@pytest.mark.parametrize(
    ("condition", "state"),
    [
        ("found_inf", "fits"),
        ("math.isfinite(threshold) and grad_norm > threshold", "fits"),
        ("not math.isfinite(grad_norm)", "not needed"),
        ("math.isnan(grad_norm) or math.isinf(grad_norm)", "not needed"),
    ],
)
def test_upstream_may_look_at_the_norm_itself(condition: str, state: str) -> None:
    source = f"""
        def step(self):
            grad_norm = self.get_grad_norm()
            return False if {condition} else self.step_with_ready_grads(), grad_norm, None
    """
    assert_judged(patch, CHAINED, source, state)


@pytest.mark.parametrize(
    ("target", "head", "after", "expected"),
    [
        (SLIME, TRAIN_STEP, "assert success", "fits"),
        (SLIME, TRAIN_STEP, "opt_param_scheduler.step(success)", "not needed"),
        (VERL, "optimizer_step(self)", 'if not success: raise NotImplementedError("failed")', "fits"),
        (VERL, "optimizer_step(self)", "if not success: log(grad_norm)", "not needed"),
        (NEMO_RL, "train(self)", "self.scheduler.step(increment=1)", "fits"),
        (NEMO_RL, "train(self)", "return success", "not needed: it does not advance the schedule"),
    ],
)
def test_frameworks_may_take_a_step_that_fails(target: str, head: str, after: str, expected: str) -> None:
    source = f"def {head}:\n    success, grad_norm, zeros = self.optimizer.step()\n    {after}"
    assert_judged(patch, target, source.replace("success", "update_successful"), expected)
