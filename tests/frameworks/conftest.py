"""Where frameworks come from: checkouts that environment variables name, and packages of the registry."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.frameworks.checkouts import VARIABLES, Checkouts
from tests.frameworks.packages import Packages
from tests.recording import installed, ran_on

STAND_INS = Path(__file__).with_name("stand_in")
#: Tests on stand-ins that are not slow: each patch in each kind of framework, with one rank and with two.
CORE = {
    "test_rollouts_with_saves_between[before-2-slime]",
    "test_rollouts_with_saves_between[after-1-miles]",
    "test_rollouts_with_saves_between[before-2-megatron.training]",
    "test_rollouts_with_saves_between[after-1-vime]",
    "test_train_goes_on_where_a_batch_broke[slime]",
    "test_bridge_and_nemo_rl",
    "test_verl_with_chunks_that_share_a_config[before]",
    "test_policy_and_teachers_side_by_side[2-slime]",
    "test_policy_and_teachers_side_by_side[1-miles]",
    "test_the_schedule_goes_on_where_the_checkpoint_left_it[miles-2]",
    "test_nemo_rl",
    "test_areal",
    "test_values_and_gradients[slime-before-2]",
    "test_values_and_gradients[miles-after-1]",
    "test_all_gather_cp[miles]",
    "test_policy_loss[miles]",
    "test_verl[before-2]",
    "test_what_happens_around_the_training",
    "test_the_student_approaches_its_teachers[slime-2-full-mixture]",
    "test_the_student_approaches_its_teachers[miles-2-24-mixture]",
    "test_the_student_approaches_its_teachers[miles-1-full-mixture]",
}
ON_STAND_INS = {
    "test_reentry.py",
    "test_inference_roles.py",
    "test_lean_loss.py",
    "test_distillation.py",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        in_this_folder = item.path.parent == Path(__file__).parent
        if in_this_folder and item.path.name in ON_STAND_INS and item.name not in CORE:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def stand_ins_on_the_path(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ranks inherit ``sys.path``; vime is slime under another name."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    if "vime" in request.node.name:
        (tmp_path / "vime").symlink_to(STAND_INS / "slime")
        monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def checkouts(request: pytest.FixtureRequest) -> Checkouts:
    """What is not given skips the test."""

    def given(framework: str) -> list[str]:
        missing = [name for name in VARIABLES[framework] if not os.environ.get(name)]
        if missing:
            pytest.skip(f"{' and '.join(missing)} not set")
        paths = [os.environ[name] for name in VARIABLES[framework]]
        megatron = paths[-1] if "MEGATRON_LM_DIR" in VARIABLES[framework] else installed("megatron-core")
        ran_on(request, paths[0], megatron)
        return paths

    return given


@pytest.fixture
def paths(framework: str, checkouts: Checkouts) -> list[str]:
    """The folders to import the framework of the test from."""
    return checkouts(framework)


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    return Packages(tmp_path_factory.mktemp("packages"))
