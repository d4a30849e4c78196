"""The CPU tests that frameworks have of what they compute with Megatron: the patches change no outcome.

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
from typing import Any, NamedTuple

import pytest

from tests.frameworks.checkouts import Checkouts
from tests.frameworks.packages import Packages
from tests.frameworks.test_real_verl import TENSORDICT
from tests.worlds.environment import without_ours

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(3600)]

HERE = Path(__file__).parent / "own_tests"


class Suite(NamedTuple):
    """Paths of a framework's own tests, and the options of pytest and the packages that they need here."""

    paths: tuple[str, ...]
    options: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    stubs: str = ""


_SLIME = (
    "advantage_whiten_cp",
    "cispo_loss",
    "cp_utils",
    "discounted_returns",
    "dp_schedule",
    "logprob_response_spans",
    "loss_cp_invariance",
    "megatron_argument_validation",
    "metric_report",
    "metric_report_dist",
    "model_provider_freeze",
    "policy_loss",
    "ppo_kl_metric",
    "ppo_logprob_entropy",
    "process_rollout_data",
    "train_data_utils",
    "value_temperature",
)
_MILES = "tests/fast/backends/training_utils"
#: Those that are in the release are run.
SUITES = {
    # Layouts with up to 16 ranks take long on few cores: one of 4 ranks stands for them.
    "slime": Suite(tuple(f"tests/test_{name}.py" for name in _SLIME), ("-k", "not real_distributed or 2-2")),
    # Its conftest needs packages that are not here, the snapshots are downloaded, and one file compiles.
    "miles": Suite(
        (_MILES,), ("--noconftest", "-k", "not snapshot", f"--ignore={_MILES}/test_ppo_ratio_numerics.py")
    ),
    "verl": Suite(
        (
            "tests/workers/test_distillation_topk_symmetry_on_cpu.py",
            "tests/workers/test_megatron_distillation_only_on_cpu.py",
        ),
        packages=TENSORDICT,
        stubs="accelerate cloudpickle datasets pandas peft",
    ),
}
#: Functions that compare with a relative tolerance of 0 and an absolute one of 1e-8, at values around 1.
EXACT = (
    "test_calculate_log_probs_and_entropy_matches_unfused_reference_single_rank",
    "test_calculate_log_probs_and_entropy_matches_unfused_reference_vocab_parallel",
)
ROUNDING = "5e-7"


def _run(paths: list[str], arguments: Iterable[str], folder: Path, **variables: str) -> dict[str, Any]:
    record = folder / "outcomes.json"
    repository = Path(__file__).parents[2]
    environ = without_ours() | {
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, *paths, repository))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OWN_TESTS_OUTCOMES": str(record),
    }
    options = ["-q", "-p", "outcomes", "-p", "no:cacheprovider", "--override-ini=addopts="]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    subprocess.run(command, cwd=paths[0], env=environ | variables, timeout=1200, check=False)
    outcomes: dict[str, Any] = json.loads(record.read_text())
    return outcomes


@pytest.mark.runs("its own tests", ranks=1)
@pytest.mark.parametrize("framework", SUITES)
def test_its_own_tests(checkouts: Checkouts, packages: Packages, tmp_path: Path, framework: str) -> None:
    suite = SUITES[framework]
    paths = checkouts(framework) + [str(packages.unpacked(release)) for release in suite.packages]
    tests = [path for path in suite.paths if (Path(paths[0]) / path).exists()]
    if not tests:
        pytest.skip("this release has none of these tests")
    plain = _run(paths, [*suite.options, *tests], tmp_path, OWN_TESTS_STUBS=suite.stubs)
    assert not plain["applied"]
    with_patches = {"MEGATRON_RL_PATCHES": "all,distillation", "OWN_TESTS_STUBS": suite.stubs}
    patched = _run(paths, [*suite.options, *tests], tmp_path, **with_patches)
    assert patched["applied"]
    differ = {test for test in plain["outcomes"] if patched["outcomes"].get(test) != plain["outcomes"][test]}
    assert {test.partition("::")[2].partition("[")[0] for test in differ} <= set(EXACT)
    assert "passed" in plain["outcomes"].values()
    if differ:
        exact = [*suite.options, *sorted(differ)]
        relaxed = _run(paths, exact, tmp_path, **with_patches, OWN_TESTS_ATOL=ROUNDING)
        assert relaxed["outcomes"] == {test: plain["outcomes"][test] for test in differ}
