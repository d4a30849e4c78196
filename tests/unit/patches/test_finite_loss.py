"""Where ``finite-loss`` has work to do."""

from __future__ import annotations

import pytest

from megatron_rl_patches.patches.finite_loss import patch

from .judging import judged

LOSS = "slime.backends.megatron_utils.loss"
UTILS = ("slime.utils.ppo_utils", "miles.backends.training_utils.loss_hub.math_utils")


@pytest.mark.parametrize("module", UTILS)
@pytest.mark.parametrize(
    ("body", "state", "reason"),
    [
        ("ratio = (-ppo_kl).exp()\n    return ratio.clamp(1 - eps, 1 + eps)", "fits", ""),
        ("ratio = torch.exp(-ppo_kl)\n    return torch.clamp(ratio, 1 - eps, 1 + eps)", "fits", ""),
        ("return torch.clamp(-ppo_kl, -20, 20).exp().clamp(1 - eps, 1 + eps)", "not needed", "bounds"),
        ("kl = (-ppo_kl).clip(max=20)\n    return kl.exp()", "not needed", "bounds"),
        ("kl = _safe_clamp_log_ratio(-ppo_kl)\n    return torch.exp(kl)", "not needed", "bounds"),
        ("return _safe_exp(-ppo_kl).clamp(1 - eps, 1 + eps)", "not needed", "exponentiates nothing"),
    ],
)
def test_upstream_may_bound_the_exponent_itself(module: str, body: str, state: str, reason: str) -> None:
    source = f"@torch.compile(dynamic=True)\ndef compute_policy_loss(ppo_kl, eps):\n    {body}"
    judgement = judged(patch, f"{module}.compute_policy_loss", source)
    assert judgement[0] == state and reason in judgement[1]


@pytest.mark.parametrize("module", UTILS)
def test_a_kl_that_is_clamped_afterwards_is_not_bounded(module: str) -> None:
    source = """
        def compute_approx_kl(log_probs, log_probs_base, kl_loss_type):
            log_ratio = log_probs_base - log_probs
            return torch.clamp(log_ratio.exp() - 1 - log_ratio, min=-10, max=10)
    """
    assert judged(patch, f"{module}.compute_approx_kl", source)[0] == "fits"
    renamed = source.replace("log_probs_base", "ref")
    assert judged(patch, f"{module}.compute_approx_kl", renamed)[0] == "drifted"


@pytest.mark.parametrize(
    ("ppo_kl", "state"),
    [
        ("old_log_probs - log_probs", "fits"),
        ("torch.where(active, old_log_probs - log_probs, 0.0)", "not needed"),
        ("(old_log_probs - log_probs).masked_fill(~active, 0.0)", "not needed"),
    ],
)
def test_upstream_may_leave_out_masked_tokens_itself(ppo_kl: str, state: str) -> None:
    source = f"""
        def policy_loss_function(args, batch, logits, sum_of_sample_mean):
            return compute_policy_loss({ppo_kl}, advantages)
    """
    assert judged(patch, f"{LOSS}.policy_loss_function", source)[0] == state


def test_releases_without_a_value_loss() -> None:
    source = "def policy_loss_function(args, batch, logits, sum_of_sample_mean): ..."
    assert judged(patch, f"{LOSS}.value_loss_function", source)[0] == "not needed"
