"""The table of ``docs/testing.md``: what a token weighs, and in which splits it weighs something else."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megatron_rl_patches.testing import Split, SplitResult, check_normalization, normalization
from tests.docs import pages
from tests.frameworks import normalization_jobs as jobs
from tests.frameworks.checkouts import Checkouts
from tests.frameworks.packages import Packages
from tests.frameworks.test_real_lean_loss import EAGER
from tests.frameworks.test_real_verl import TENSORDICT
from tests.real.normalization_losses import VOCABULARY, global_batch

pytestmark = pytest.mark.slow

#: What a token of the undivided batch weighs, and the options of the loss of this package that has it.
WEIGHTS: dict[str, dict[str, Any]] = {
    "1 / tokens": {"normalization": "token"},
    "1 / (samples × its tokens)": {"normalization": "sequence"},
    "1 / samples": {"normalization": "constant", "constant_length": 1},
    "1 / (samples × longest response)": {"normalization": "constant", "constant_length": 9},
}
NORM = "seq-mean-token-sum-norm"
VERL: dict[str, dict[str, Any]] = {
    "`token-mean`": {"loss_agg_mode": "token-mean"},
    "`seq-mean-token-mean`": {"loss_agg_mode": "seq-mean-token-mean"},
    "`seq-mean-token-sum`": {"loss_agg_mode": "seq-mean-token-sum"},
    f"`{NORM}`": {"loss_agg_mode": NORM},
    f"`{NORM}`, nested tensors": {"loss_agg_mode": NORM, "nested": True},
    "the same, `loss_scale_factor` set": {"loss_agg_mode": NORM, "nested": True, "loss_scale_factor": 9},
}


def row(loss: str, function: jobs.OfFramework, per_token: bool, is_train_step: bool = False) -> str:
    """Return the row of the table."""
    batch = global_batch()
    setting = {"calculate_per_token_loss": per_token}
    report = check_normalization(function, batch, is_train_step=is_train_step, **setting)
    if function.function is jobs.plain_loss:  # a likelihood, which is the policy gradient of equal advantages
        batch = [_without_advantages(sample) for sample in batch]
    length = max(len(sample["tokens"]) for sample in batch) + 1
    run = partial(normalization._run, sizes=(VOCABULARY, length), timeout=300, jobs=[(Split(), batch)])
    [whole] = run(function, is_train_step, per_token=per_token)
    weighs = [name for name, options in WEIGHTS.items() if _is_same(whole, run, function, options)]
    different = "; ".join(map(_cell, (result for result in report.rows if not result.same)))
    remedy = report.remedy or ("" if report.same else "none was found")
    return f"| {loss} | {per_token} | {' '.join(weighs)} | {different or 'none'} | {remedy} |"


def _is_same(whole: torch.Tensor, run: Any, function: jobs.OfFramework, options: dict[str, Any]) -> bool:
    reference = jobs.OfFramework(jobs.reference_loss, function.framework, function.paths, options)
    [gradient] = run(reference, False, per_token=True)
    # miles rounds gradients of logits to bfloat16, by Megatron's fused cross entropy.
    return bool((whole - gradient).norm() < 1e-2 * gradient.norm())


def _without_advantages(sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mask = sample["loss_mask"]
    return {"tokens": sample["tokens"], "loss_mask": mask, "advantages": torch.ones(len(mask))}


def _cell(result: SplitResult) -> str:
    if result.weights:
        return f"{result.split}: {result.per}s {min(result.weights):.3g} to {max(result.weights):.3g}"
    return f"{result.split}: × {result.factor:.3g}"


def check_page(rows: list[str]) -> None:
    page = (pages.ROOT / "docs" / "testing.md").read_text("utf-8").splitlines()
    missing = [row for row in rows if row not in page]
    assert not missing, "docs/testing.md lacks:\n" + "\n".join(missing)


@pytest.mark.runs("losses", ranks=[1, 2])
def test_losses_of_this_package() -> None:
    rows = []
    for name in ("token", "sequence"):
        function = jobs.OfFramework(jobs.reference_loss, "", [], {"normalization": name})
        loss = f'`make_loss_func`, `normalization="{name}"`'
        rows += [row(loss, function, per_token) for per_token in (False, True)]
    for name, loss in (
        ("over_the_step", "sum of this rank's tokens, with their number"),
        ("over_its_microbatch", "mean over the microbatch's tokens"),
        ("over_its_samples", "mean over the microbatch's samples"),
        ("without_context_parallelism", "sum of this rank's tokens, with the number of all CP ranks"),
    ):
        function = jobs.OfFramework(jobs.plain_loss, "", [], {"name": name})
        rows += [row(loss, function, per_token) for per_token in (False, True)]
    check_page(rows)


@pytest.mark.frameworks
@pytest.mark.runs("losses", ranks=[1, 2])
@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_rollout_losses(framework: str, paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in EAGER.items():
        monkeypatch.setenv(name, value)
    function = jobs.OfFramework(jobs.rollout_loss, framework, paths)
    check_page([row(f"{framework}, `policy_loss`", function, per_token) for per_token in (False, True)])


@pytest.mark.frameworks
@pytest.mark.runs("losses", ranks=[1, 2])
@pytest.mark.parametrize("loss", VERL)
def test_verl(loss: str, checkouts: Checkouts, packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in EAGER.items():
        monkeypatch.setenv(name, value)
    paths = checkouts("verl") + [str(packages.unpacked(release)) for release in TENSORDICT]
    function = jobs.OfFramework(jobs.verl_train_step, "verl", paths, VERL[loss])
    is_refused = VERL[loss]["loss_agg_mode"] == "seq-mean-token-mean"  # with calculate_per_token_loss
    settings = (False,) if is_refused else (False, True)
    check_page([row(f"verl, {loss}", function, per_token, is_train_step=True) for per_token in settings])
