"""``lean-loss`` and ``finite-loss`` on unmodified checkouts, as in ``test_real_reentry.py``.

Values and gradients against a dense float64 reference, unpatched and patched, through the frameworks' own
``get_log_probs_and_entropy`` and ``loss_function``. Up to slime v0.3.0 and in miles the unpatched gradient is
rounded to bfloat16, by Megatron's fused cross entropy; the patched one is not.
"""

import importlib
import runpy
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl_patches import applied
from tests.frameworks import test_finite_loss as finite
from tests.frameworks.import_stubs import prepare
from tests.frameworks.test_lean_loss import BFLOAT16, check_policy_loss, check_scores
from tests.ranks import on_ranks

pytestmark = [pytest.mark.frameworks, pytest.mark.slow]

LAYOUTS = [
    pytest.param(1, {}, id="1 rank"),
    pytest.param(2, {"tp": 2}, id="TP 2"),
    pytest.param(2, {"cp": 2}, id="zigzag CP 2"),
    pytest.param(2, {"cp": 2, "allgather_cp": True}, id="all-gather CP 2"),
]
RECOMPUTED = pytest.param(
    1, {"recompute_loss_function": True, "calculate_per_token_loss": True}, id="recomputed"
)
of_losses = pytest.mark.parametrize("framework", ["slime", "vime", "miles"])


def _initialize(framework: str, paths: list[str], layout: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the layout, other than sizes."""
    if layout.get("allgather_cp"):
        text = "".join(path.read_text() for path in Path(paths[0]).glob(f"{framework}/backends/**/*.py"))
        if "allgather_cp_redistribute" not in text:
            pytest.skip("this release has no all-gather CP")
    prepare(paths)
    from tests.frameworks.loss_jobs import initialize

    initialize(tp=layout.get("tp", 1), cp=layout.get("cp", 1))
    return {name: value for name, value in layout.items() if name not in ("tp", "cp")}


@pytest.mark.runs("losses")
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
@of_losses
@on_ranks(lambda ranks: ranks, timeout=400)
def test_scores_and_policy_loss(framework: str, ranks: int, layout: dict[str, Any], paths: list[str]) -> None:
    options = _initialize(framework, paths, layout)
    assert check_scores(framework, **options) < BFLOAT16
    check_policy_loss(framework, **options)
    from megatron_rl_patches.frameworks.response_scores import forms
    from tests.frameworks.loss_jobs import LossJob

    # Each function was tried, and none runs its own code.
    assert all(forms.values()) and bool(forms) != bool(layout.get("allgather_cp"))
    if LossJob(framework).names_of_masks():  # slime from v0.3.1 on, and radixark/miles#2595
        if framework == "miles" and "cp" in layout:
            # miles#2596 raises where a rank has no response token of a sample: an empty list becomes floats.
            options |= {"totals": (17,), "responses": (15,)}
        assert check_scores(framework, masked=True, **options) < BFLOAT16


@pytest.mark.parametrize("framework", ["slime", "miles"])
@on_ranks(1, timeout=300)
def test_importance_weights(framework: str, paths: list[str]) -> None:
    """Those of its own functions, and of the example that its documentation names."""
    prepare(paths)
    from tests.frameworks.loss_jobs import CORRECTIONS, MASKS, SAMPLED, TRAINED, Arguments, importance_weights

    bounds, own = {"tis_clip": 1.2, "tis_clip_low": 0.9}, importlib.import_module(CORRECTIONS[framework])
    data = {"train_log_probs": TRAINED, "rollout_log_probs": SAMPLED, "loss_masks": MASKS}
    for function, level in ((own.vanilla_tis_function, None), (own.icepop_function, "token")):
        expected_n, masks, _ = function(Arguments(**bounds), pg_loss=torch.cat(MASKS), **data)
        torch.testing.assert_close(importance_weights(**bounds, tis_mask_level=level), expected_n)
        assert masks is MASKS  # what is masked stays in the count
    [example] = Path(paths[0], "examples").rglob("mis.py")
    compute, limits = runpy.run_path(str(example))["compute_mis_weights"], {"tis_upper_bound": 1.2}
    for level, mode in product(("token", "sequence", "geometric"), ("truncate", "clip", "mask")):
        bounds["tis_clip_low"] = limits["tis_lower_bound"] = 0.0 if mode == "truncate" else 0.9
        weights, masks, _ = compute(Arguments(use_tis=True, tis_level=level, tis_mode=mode, **limits), **data)
        options = {"tis_level": level, "tis_mask_level": level if mode == "mask" else None}
        expected_n = torch.cat(weights) * torch.cat(masks)
        torch.testing.assert_close(importance_weights(**bounds, **options), expected_n)


# --- finite-loss


def _losses(framework: str, paths: list[str]) -> dict[str, Any]:
    """Return the losses that the command line of this release has."""
    text = Path(paths[0], framework, "utils", "arguments.py").read_text()
    of_all = finite.LOSSES.items()
    return {name: loss for name, loss in of_all if loss.get("advantage_estimator", "") in text}


@pytest.mark.parametrize(("ranks", "layout"), [*LAYOUTS, RECOMPUTED])
@of_losses
@on_ranks(lambda ranks: ranks, timeout=600)
def test_masked_tokens(framework: str, ranks: int, layout: dict[str, Any], paths: list[str]) -> None:
    options, losses = _initialize(framework, paths, layout), _losses(framework, paths)
    with warnings.catch_warnings(action="ignore"):  # that use_reentrant is not given
        assert finite.check_masked_tokens(framework, losses, **options) > 10
        for with_lean_loss in (False, True):
            finite.check_policy(framework, with_lean_loss, losses, **options)
        finite.check_counted_tokens(framework, losses, **options)
        if "recompute_loss_function" not in layout:
            # OpenClaw-RL computes this entropy without grad mode; its log-probs overwrite the logits then.
            own = Path(paths[0], framework, "backends").rglob("loss.py")
            spoils = any("entropy_for_monitor" in file.read_text() for file in own)
            finite.check_metrics(framework, losses, spoils, **options)
        if layout == {}:
            checked = finite.check_masked_tokens(framework, losses, spoilt_by=finite.SPOILT)
            assert checked > (30 if framework == "miles" else 50)  # miles has fewer losses
            finite.check_value_loss(framework)
            with applied("lean-loss"):
                recomputed = {"deferred": True, "recompute_loss_function": True}
                assert finite.check_masked_tokens(framework, losses, **recomputed) > 10
                finite.check_counted_tokens(framework, losses, deferred=True)
