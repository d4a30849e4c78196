"""In which splits losses of slime, miles and verl have another gradient, as ``docs/testing.md`` says."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl_patches.testing import SPLITS, RanksFailed, Split, check_normalization
from tests.frameworks import normalization_jobs as jobs
from tests.frameworks.checkouts import Checkouts
from tests.frameworks.import_stubs import EAGER
from tests.frameworks.packages import TENSORDICT, Packages
from tests.real.test_normalization import global_batch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.frameworks,
    pytest.mark.timeout(900),  # up to six starts of ranks, each of which imports a framework
    pytest.mark.runs("losses", ranks=[1, 2]),
]

ROLLOUT: dict[str, dict[str, Any]] = {
    "policy": {"loss_type": "policy_loss"},
    "value": {"loss_type": "value_loss"},
    "distillation": {
        "loss_type": "custom_loss",
        "custom_loss_function_path": "megatron_rl_patches.frameworks.distillation_loss.opd_loss",
    },
}
NORM = "seq-mean-token-sum-norm"
VERL: dict[str, dict[str, Any]] = {
    "policy, token-mean": {"loss_agg_mode": "token-mean"},
    "policy, seq-mean-token-mean": {"loss_agg_mode": "seq-mean-token-mean"},
    "policy, seq-mean-token-sum": {"loss_agg_mode": "seq-mean-token-sum"},
    f"policy, {NORM}": {"loss_agg_mode": NORM},
    f"policy, {NORM}, nested tensors": {"loss_agg_mode": NORM, "nested": True},
    "the same, loss_scale_factor set": {"loss_agg_mode": NORM, "nested": True, "loss_scale_factor": 9},
    "value, token-mean": {"loss_agg_mode": "token-mean", "of": "value"},
    "distillation, token-mean": {"loss_agg_mode": "token-mean", "of": "distillation"},
}
WITH_CP = {"CP 2", "CP 2, uneven"}


@pytest.mark.parametrize("of", ROLLOUT)
@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_rollout_losses(framework: str, of: str, paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in EAGER.items():
        monkeypatch.setenv(name, value)
    function = jobs.OfFramework(jobs.rollout_loss, framework, paths, ROLLOUT[of])
    for setting in (False, True):
        report = check_normalization(function, global_batch(), calculate_per_token_loss=setting)
        # miles rounds gradients of logits to bfloat16, by Megatron's fused cross entropy.
        assert max(report.differences.values()) < 1e-2, report


@pytest.mark.parametrize("loss", VERL)
def test_verl(loss: str, checkouts: Checkouts, packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in EAGER.items():
        monkeypatch.setenv(name, value)
    paths = checkouts("verl") + [str(packages.unpacked(release)) for release in TENSORDICT]
    options = VERL[loss]
    function = jobs.OfFramework(jobs.verl_train_step, "verl", paths, options)
    # Without loss_scale_factor it divides by the longest response of the microbatch.
    by_longest = options.get("nested", False) and "loss_scale_factor" not in options
    for setting in (False, True):
        if setting and options["loss_agg_mode"] == "seq-mean-token-mean":
            continue  # verl refuses it with calculate_per_token_loss
        expected = {*SPLITS} - {"CP 2"} if by_longest else set()
        if setting:
            expected |= WITH_CP
        report = check_normalization(
            function, global_batch(), calculate_per_token_loss=setting, is_train_step=True
        )
        assert set(report.different) == expected, report
    if options.get("of") == "distillation":
        alone = {"a masked sample alone": Split(microbatches=8)}
        with pytest.raises(RanksFailed, match=r"numel\(\) == 0"):
            check_normalization(function, global_batch(), alone, is_train_step=True)
