"""Where ``finite-loss`` has work to do."""

from __future__ import annotations

import pytest

from megatron_rl_patches.patches.finite_loss import patch

from .judging import assert_judged

LOSS = "slime.backends.megatron_utils.loss"


@pytest.mark.parametrize(
    "module", ["slime.utils.ppo_utils", "miles.backends.training_utils.loss_hub.math_utils"]
)
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("ratio = (-ppo_kl).exp()\n    return ratio.clamp(1 - eps, 1 + eps)", "fits"),
        ("ratio = torch.exp(-ppo_kl)\n    return torch.clamp(ratio, 1 - eps, 1 + eps)", "fits"),
        ("return torch.clamp(-ppo_kl, -20, 20).exp().clamp(1 - eps, 1 + eps)", "not needed: bounds"),
        ("kl = (-ppo_kl).clip(max=20)\n    return kl.exp()", "not needed: bounds"),
        ("kl = _safe_clamp_log_ratio(-ppo_kl)\n    return torch.exp(kl)", "not needed: bounds"),
        ("return _safe_exp(-ppo_kl).clamp(1 - eps, 1 + eps)", "not needed: exponentiates nothing"),
    ],
)
def test_upstream_may_bound_the_exponent_itself(module: str, body: str, expected: str) -> None:
    source = f"@torch.compile(dynamic=True)\ndef compute_policy_loss(ppo_kl, eps):\n    {body}"
    assert_judged(patch, f"{module}.compute_policy_loss", source, expected)
    # A KL that is clamped afterwards is not bounded.
    kl = "def compute_approx_kl(log_probs, {}, kl_loss_type): return torch.clamp(log_ratio.exp() - 1, max=10)"
    assert_judged(patch, f"{module}.compute_approx_kl", kl.format("log_probs_base"), "fits")
    assert_judged(patch, f"{module}.compute_approx_kl", kl.format("ref"), "drifted")


@pytest.mark.parametrize(
    ("ppo_kl", "state"),
    [
        ("old_log_probs - log_probs", "fits"),
        ("torch.where(active, old_log_probs - log_probs, 0.0)", "not needed"),
        ("(old_log_probs - log_probs).masked_fill(~active, 0.0)", "not needed"),
    ],
)
def test_upstream_may_leave_out_masked_tokens_itself(ppo_kl: str, state: str) -> None:
    source = "def policy_loss_function(args, batch, logits, sum_of_sample_mean):"
    source += f"\n    return compute_policy_loss({ppo_kl}, advantages)"
    assert_judged(patch, f"{LOSS}.policy_loss_function", source, state)
    assert_judged(patch, f"{LOSS}.value_loss_function", source, "not needed")  # this release has none
