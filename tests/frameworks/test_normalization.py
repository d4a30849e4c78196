"""The table of ``docs/testing.md``: what a token weighs, and in which splits it weighs something else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from megatron_rl_patches.testing import (
    SPLITS,
    RanksFailed,
    Split,
    SplitResult,
    check_normalization,
    normalization,
)
from tests.docs import pages
from tests.frameworks import normalization_jobs as jobs
from tests.frameworks.checkouts import Checkouts
from tests.frameworks.packages import Packages
from tests.frameworks.test_real_lean_loss import EAGER
from tests.frameworks.test_real_verl import TENSORDICT
from tests.real.normalization_losses import MASKED, VOCABULARY, global_batch

pytestmark = pytest.mark.slow

#: What a token of the batch without masked samples weighs, and the options of the loss that has it.
WEIGHTS: dict[str, dict[str, Any]] = {
    "1 / tokens": {"normalization": "token"},
    "1 / (samples × its tokens)": {"normalization": "sequence"},
    "1 / samples": {"normalization": "constant", "constant_length": 1},
    "1 / (samples × longest response)": {"normalization": "constant", "constant_length": 9},
}
#: Name in the table -> (function, kind of the loss).
PLAIN: dict[str, tuple[dict[str, Any], str]] = {
    "sum of this rank's tokens, with their number": ({"name": "over_the_step"}, "likelihood"),
    "mean over the microbatch's tokens": ({"name": "over_its_microbatch"}, "likelihood"),
    "mean over the microbatch's samples": ({"name": "over_its_samples"}, "likelihood"),
    "sum of this rank's tokens, with the number of all CP ranks": (
        {"name": "without_context_parallelism"},
        "likelihood",
    ),
    "value, mean over the microbatch's tokens × microbatches": (
        {"name": "sum_of_means", "of": "value"},
        "value",
    ),
    "distillation, mean over the microbatch's tokens": (
        {"name": "over_its_microbatch", "of": "distillation"},
        "distillation",
    ),
}
ROLLOUT: dict[str, dict[str, Any]] = {
    "policy": {"loss_type": "policy_loss"},
    "value": {"loss_type": "value_loss"},
    "distillation": {
        "loss_type": "custom_loss",
        "custom_loss_function_path": "megatron_rl_patches.frameworks.distillation_loss.opd_loss",
    },
}
#: miles rounds gradients of logits to bfloat16, by Megatron's fused cross entropy.
_ROUNDED = 1e-2
NORM = "seq-mean-token-sum-norm"
VERL: dict[str, dict[str, Any]] = {
    "policy, `token-mean`": {"loss_agg_mode": "token-mean"},
    "policy, `seq-mean-token-mean`": {"loss_agg_mode": "seq-mean-token-mean"},
    "policy, `seq-mean-token-sum`": {"loss_agg_mode": "seq-mean-token-sum"},
    f"policy, `{NORM}`": {"loss_agg_mode": NORM},
    f"policy, `{NORM}`, nested tensors": {"loss_agg_mode": NORM, "nested": True},
    "the same, `loss_scale_factor` set": {"loss_agg_mode": NORM, "nested": True, "loss_scale_factor": 9},
    "value, `token-mean`": {"loss_agg_mode": "token-mean", "of": "value"},
    "distillation, `token-mean`": {"loss_agg_mode": "token-mean", "of": "distillation"},
}


def table(
    loss: str,
    function: jobs.OfFramework,
    of: str = "policy",
    *,
    settings: Sequence[bool] = (False, True),
    is_train_step: bool = False,
    masked: Sequence[int] = MASKED,
) -> list[str]:
    """Return the rows of the table, a single one if ``calculate_per_token_loss`` does not matter."""
    cells = [_cells(function, of, setting, is_train_step, masked) for setting in settings]
    if len(set(cells)) < len(settings):
        return [f"| {loss} | either | {cells[0]} |"]
    return [f"| {loss} | {setting} | {text} |" for setting, text in zip(settings, cells, strict=True)]


def _cells(
    function: jobs.OfFramework, of: str, per_token: bool, is_train_step: bool, masked: Sequence[int]
) -> str:
    batch = global_batch(masked)
    report = check_normalization(
        function, batch, calculate_per_token_loss=per_token, is_train_step=is_train_step
    )
    length = max(len(sample["tokens"]) for sample in batch) + 1
    jobs_of_run = [(Split(without_masked=True), batch)]
    run = partial(normalization._run, sizes=(VOCABULARY, length), timeout=300, jobs=jobs_of_run)
    [whole] = run(function, is_train_step, per_token=per_token)
    weighs = next(name for name, options in WEIGHTS.items() if _is_same(whole, run, function, of, options))
    different = "; ".join(map(_cell, (result for result in report.rows if not result.same)))
    return f"{weighs} | {different or 'none'}"


def _is_same(
    whole: torch.Tensor, run: Any, function: jobs.OfFramework, of: str, options: dict[str, Any]
) -> bool:
    options = {"of": of, **options}
    reference = jobs.OfFramework(jobs.reference_loss, function.framework, function.paths, options)
    [gradient] = run(reference, False, per_token=True)
    return bool((whole - gradient).norm() < _ROUNDED * gradient.norm())


def _cell(result: SplitResult) -> str:
    about = "" if result.residual < _ROUNDED else "about "
    return f"{result.split}: {about}× {result.factor:.3g}"


def check_page(rows: list[str]) -> None:
    page = (pages.ROOT / "docs" / "testing.md").read_text("utf-8").splitlines()
    missing = [row for row in rows if row not in page]
    assert not missing, "docs/testing.md lacks:\n" + "\n".join(missing)


@pytest.mark.runs("losses", ranks=[1, 2])
def test_losses_of_this_package() -> None:
    rows = []
    for of, loss in (("policy", "make_loss_func"), ("distillation", "make_distillation_loss_func")):
        for name in ("token", "sequence"):
            options = {"of": of, "normalization": name}
            function = jobs.OfFramework(jobs.reference_loss, "", [], options)
            rows += table(f'`{loss}`, `normalization="{name}"`', function, of)
    for loss, (options, of) in PLAIN.items():
        rows += table(loss, jobs.OfFramework(jobs.plain_loss, "", [], options), of)
    check_page(rows)


@pytest.mark.frameworks
@pytest.mark.runs("losses", ranks=[1, 2])
@pytest.mark.parametrize("of", ROLLOUT)
@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_rollout_losses(framework: str, of: str, paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in EAGER.items():
        monkeypatch.setenv(name, value)
    function = jobs.OfFramework(jobs.rollout_loss, framework, paths, ROLLOUT[of])
    check_page(table(f"{framework}, {of}", function, of))


@pytest.mark.frameworks
@pytest.mark.runs("losses", ranks=[1, 2])
@pytest.mark.parametrize("loss", VERL)
def test_verl(loss: str, checkouts: Checkouts, packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in EAGER.items():
        monkeypatch.setenv(name, value)
    paths = checkouts("verl") + [str(packages.unpacked(release)) for release in TENSORDICT]
    options = VERL[loss]
    function = jobs.OfFramework(jobs.verl_train_step, "verl", paths, options)
    of = options.get("of", "policy")
    how: dict[str, Any] = {"is_train_step": True}
    if options["loss_agg_mode"] == "seq-mean-token-mean":  # verl refuses it with calculate_per_token_loss
        how["settings"] = (False,)
    if of == "distillation":
        alone = {"token budget": SPLITS["token budget"]}
        with pytest.raises(RanksFailed, match=r"numel\(\) == 0"):
            check_normalization(function, global_batch(), alone, is_train_step=True)
        how["masked"] = MASKED[1:]  # which fills no microbatch alone
    check_page(table(f"verl, {loss}", function, of, **how))
