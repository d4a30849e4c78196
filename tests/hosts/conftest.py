"""Where hosts come from: checkouts that environment variables name, and packages of the registry."""

from __future__ import annotations

import os

import pytest

from tests.hosts.checkouts import VARIABLES, Checkouts
from tests.hosts.packages import Packages
from tests.recording import installed, ran_on


@pytest.fixture
def checkouts(request: pytest.FixtureRequest) -> Checkouts:
    """What is not given skips the test."""

    def given(host: str) -> list[str]:
        missing = [name for name in VARIABLES[host] if not os.environ.get(name)]
        if missing:
            pytest.skip(f"{' and '.join(missing)} not set")
        paths = [os.environ[name] for name in VARIABLES[host]]
        megatron = paths[-1] if "MEGATRON_LM_DIR" in VARIABLES[host] else installed("megatron-core")
        ran_on(request, paths[0], megatron)
        return paths

    return given


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    return Packages(tmp_path_factory.mktemp("packages"))
