"""Where frameworks come from: checkouts that environment variables name, and packages of the registry."""

import os
from pathlib import Path

import pytest

from tests.frameworks.checkouts import VARIABLES, Checkouts
from tests.frameworks.packages import BRIDGE, HYDRA, TENSORDICT, VERL, Packages
from tests.frameworks.rollouts import TRANSFORMER_ENGINE
from tests.recording import installed, ran_on

STAND_INS = Path(__file__).with_name("stand_in")


@pytest.fixture
def stand_ins_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks inherit ``sys.path``."""
    monkeypatch.syspath_prepend(str(STAND_INS))


def has_transformer_engine(request: pytest.FixtureRequest) -> bool:
    return "layers" in request.fixturenames and request.getfixturevalue("layers") == TRANSFORMER_ENGINE


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
def paths(framework: str, checkouts: Checkouts, request: pytest.FixtureRequest) -> list[str]:
    if framework == "vime" and has_transformer_engine(request):
        pytest.skip("vime's own command line was not tried")
    return checkouts(framework)


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    return Packages(tmp_path_factory.mktemp("packages"))


@pytest.fixture(params=["package", pytest.param("checkout", marks=pytest.mark.frameworks)])
def verl(request: pytest.FixtureRequest, packages: Packages, checkouts: Checkouts) -> list[str]:
    """The folders to import it from: the package of the registry, and the checkout in ``VERL_DIR``."""
    if request.param == "checkout":
        folders = checkouts("verl")
    else:
        folders = [str(packages.unpacked(VERL))]
        ran_on(request, VERL, installed("megatron-core"))
    if has_transformer_engine(request):
        folders.append(str(packages.unpacked(BRIDGE)))
    return folders + [str(packages.unpacked(release)) for release in TENSORDICT + HYDRA]
