"""``lean-loss`` on unmodified checkouts of slime, OpenClaw-RL and miles, as in ``test_real_reentry.py``.

Values and gradients against a dense float64 reference, unpatched and patched, through the frameworks' own
``get_log_probs_and_entropy`` and ``loss_function``. Up to slime v0.3.0 and in miles the unpatched gradient is
rounded to bfloat16, by Megatron's fused cross entropy; the patched one is not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.import_stubs import EAGER, prepare
from tests.frameworks.test_lean_loss import BFLOAT16, check_policy_loss, check_scores
from tests.ranks import on_ranks

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.slow,
    pytest.mark.runs("losses"),
    pytest.mark.parametrize(
        ("ranks", "layout"),
        [
            pytest.param(1, {}, id="1 rank"),
            pytest.param(2, {"tp": 2}, id="TP 2"),
            pytest.param(2, {"cp": 2}, id="zigzag CP 2"),
            pytest.param(2, {"cp": 2, "allgather_cp": True}, id="all-gather CP 2"),
        ],
    ),
    pytest.mark.parametrize("framework", ["slime", "vime", "miles"]),
]


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


@on_ranks(lambda ranks: ranks, timeout=300, env=EAGER)
def test_log_probs_and_entropy(framework: str, ranks: int, layout: dict[str, Any], paths: list[str]) -> None:
    options = _initialize(framework, paths, layout)
    assert check_scores(framework, **options) < BFLOAT16


@on_ranks(lambda ranks: ranks, timeout=300, env=EAGER)
def test_policy_loss(framework: str, ranks: int, layout: dict[str, Any], paths: list[str]) -> None:
    check_policy_loss(framework, **_initialize(framework, paths, layout))
