"""Where ``finite-step`` has work to do."""

from __future__ import annotations

import pytest

from megatron_rl_patches.patches.finite_step import patch

from .judging import judged

CHAINED = "megatron.core.optimizer.optimizer.ChainedOptimizer.step"
SLIME = "slime.backends.megatron_utils.model.train_one_step"
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
            update_successful = False if {condition} else self.step_with_ready_grads()
            return update_successful, grad_norm, None
    """
    assert judged(patch, CHAINED, source)[0] == state


@pytest.mark.parametrize(
    ("after", "state"),
    [("assert update_successful", "fits"), ("if update_successful:", "not needed")],
)
def test_slime_may_stop_asserting(after: str, state: str) -> None:
    source = f"""
        def train_one_step(args, model, optimizer, opt_param_scheduler):
            update_successful, grad_norm, num_zeros_in_grad = optimizer.step()
            {after}
                opt_param_scheduler.step(increment=1)
    """.replace("successful\n                opt", "successful\n            opt")
    assert judged(patch, SLIME, source)[0] == state


@pytest.mark.parametrize(
    ("otherwise", "state"),
    [('raise NotImplementedError("failed")', "fits"), ("log(grad_norm)", "not needed")],
)
def test_verl_may_stop_raising(otherwise: str, state: str) -> None:
    source = f"""
        def optimizer_step(self):
            update_successful, grad_norm, num_zeros_in_grad = self.optimizer.step()
            if not update_successful:
                {otherwise}
            return grad_norm
    """
    assert judged(patch, VERL, source)[0] == state


def test_nemo_rl_may_leave_the_schedule_alone() -> None:
    source = "def train(self):\n    self.optimizer.step()"
    assert judged(patch, NEMO_RL, source) == ("not needed", "it does not advance the schedule")
    assert judged(patch, NEMO_RL, f"{source}\n    self.scheduler.step(increment=1)")[0] == "fits"
