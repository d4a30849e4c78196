"""Tests of frameworks of what they compute with Megatron: patches change no outcome.

Megatron-LM's own are run in ``tests/lab/conformance``.

Two of slime's ask for the very bits of its own order of operations. With patches they get a tolerance of
float32 rounding, which is put under ``torch.testing.assert_close`` from outside (``own_tests``).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.checkouts import Checkouts
from tests.frameworks.packages import TENSORDICT, Packages
from tests.worlds.program import ROOT, without_ours

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(3600)]

HERE = Path(__file__).parent / "own_tests"


_SLIME = (
    "advantage_whiten_cp cispo_loss cp_utils discounted_returns dp_schedule logprob_response_spans "
    "loss_cp_invariance megatron_argument_validation metric_report metric_report_dist "
    "model_provider_freeze policy_loss ppo_kl_metric ppo_logprob_entropy process_rollout_data "
    "train_data_utils value_temperature"
)
_MILES = "tests/fast/backends/training_utils"
#: Paths of a framework's own tests, of which those in the release are run, and options of pytest.
SUITES: dict[str, tuple[list[str], list[str]]] = {
    # Layouts with up to 16 ranks take long on few cores: one of 4 ranks stands for them.
    "slime": ([f"tests/test_{name}.py" for name in _SLIME.split()], ["-k", "not real_distributed or 2-2"]),
    # Its conftest needs packages that are not here, the snapshots are downloaded, and one file compiles.
    "miles": (
        [_MILES],
        ["--noconftest", "-k", "not snapshot", f"--ignore={_MILES}/test_ppo_ratio_numerics.py"],
    ),
    "verl": (
        [
            "tests/workers/test_distillation_topk_symmetry_on_cpu.py",
            "tests/workers/test_megatron_distillation_only_on_cpu.py",
        ],
        [],
    ),
}


def _run(paths: list[str], arguments: Iterable[str], folder: Path, **variables: str) -> dict[str, Any]:
    record = folder / "outcomes.json"
    environ = without_ours() | {
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, *paths, ROOT))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OWN_TESTS_OUTCOMES": str(record),
        "OWN_TESTS_ATOL": "0",
    }
    options = ["-q", "-p", "outcomes", "-p", "no:cacheprovider", "--override-ini=addopts="]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    subprocess.run(command, cwd=paths[0], env=environ | variables, timeout=1200, check=False)
    outcomes: dict[str, Any] = json.loads(record.read_text())
    return outcomes


@pytest.mark.runs("its own tests", ranks=1)
@pytest.mark.parametrize("framework", SUITES)
def test_its_own_tests(checkouts: Checkouts, packages: Packages, tmp_path: Path, framework: str) -> None:
    files, options = SUITES[framework]
    of_verl = [str(packages.unpacked(release)) for release in TENSORDICT if framework == "verl"]
    paths = checkouts(framework) + of_verl
    tests = [path for path in files if (Path(paths[0]) / path).exists()]
    if not tests:
        pytest.skip("this release has none of these tests")
    plain = _run(paths, [*options, *tests], tmp_path)
    patched = _run(paths, [*options, *tests], tmp_path, MEGATRON_RL_PATCHES="all,distillation")
    assert patched["applied"] and not plain["applied"]
    assert patched["outcomes"] == plain["outcomes"]
    assert "passed" in plain["outcomes"].values()
