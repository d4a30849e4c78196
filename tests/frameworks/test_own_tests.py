"""slime's own CPU tests of what it computes with Megatron, with all patches: what passes without passes with.

Some of them ask for the very bits of slime's own order of operations. Those pass with a tolerance of float32
rounding, which is put under ``torch.testing.assert_close`` from outside (``own_tests/sitecustomize.py``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.checkouts import Checkouts

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(3600)]

HERE = Path(__file__).parent / "own_tests"
#: Those that are in the release are run.
FILES = (
    "test_advantage_whiten_cp.py",
    "test_cispo_loss.py",
    "test_cp_utils.py",
    "test_discounted_returns.py",
    "test_logprob_response_spans.py",
    "test_loss_cp_invariance.py",
    "test_policy_loss.py",
    "test_ppo_kl_metric.py",
    "test_ppo_logprob_entropy.py",
    "test_value_temperature.py",
)
#: Functions that compare with a relative tolerance of 0 and an absolute one of 1e-8, at values around 1.
EXACT = (
    "test_calculate_log_probs_and_entropy_matches_unfused_reference_single_rank",
    "test_calculate_log_probs_and_entropy_matches_unfused_reference_vocab_parallel",
)
ROUNDING = "5e-7"
PATCHES = "all,topk-distillation"


def _run(paths: list[str], tests: Iterable[str], folder: Path, **variables: str) -> dict[str, Any]:
    record = folder / "outcomes.json"
    repository = Path(__file__).parents[2]
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_RL_PATCHES")
    }
    environ |= {
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, *paths, repository))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OWN_TESTS_OUTCOMES": str(record),
    }
    options = ["-q", "-p", "outcomes", "-p", "no:cacheprovider", "--override-ini=addopts="]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    subprocess.run(command, cwd=paths[0], env=environ | variables, timeout=1200, check=False)
    outcomes: dict[str, Any] = json.loads(record.read_text())
    return outcomes


@pytest.mark.runs("its own tests", ranks=1)
def test_slimes_own_tests(checkouts: Checkouts, tmp_path: Path) -> None:
    paths = checkouts("slime")
    tests = [f"tests/{name}" for name in FILES if (Path(paths[0]) / "tests" / name).exists()]
    if not tests:
        pytest.skip("this release has none of these tests")
    plain = _run(paths, tests, tmp_path)
    assert not plain["applied"]
    patched = _run(paths, tests, tmp_path, MEGATRON_RL_PATCHES=PATCHES)
    assert patched["applied"]
    differ = {test for test in plain["outcomes"] if patched["outcomes"].get(test) != plain["outcomes"][test]}
    assert {test.partition("::")[2].partition("[")[0] for test in differ} <= set(EXACT)
    assert "passed" in plain["outcomes"].values()
    if differ:
        relaxed = _run(paths, sorted(differ), tmp_path, MEGATRON_RL_PATCHES=PATCHES, OWN_TESTS_ATOL=ROUNDING)
        assert relaxed["outcomes"] == {test: plain["outcomes"][test] for test in differ}
