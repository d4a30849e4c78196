"""All tests of this folder run on the megatron-core that ``--megatron-core`` names."""

from __future__ import annotations

from importlib import metadata

import pytest

from megatron_rl_patches.testing import cpu_backend, spawn_ranks


def _version() -> str:
    with cpu_backend():
        import megatron.core

        return megatron.core.__version__.partition("+")[0]


@pytest.mark.parametrize(
    "env", [pytest.param({}, id="forked"), pytest.param({"FRESH": "1"}, id="fresh", marks=pytest.mark.slow)]
)
def test_ranks_import_the_release_of_the_option(pytestconfig: pytest.Config, env: dict[str, str]) -> None:
    release = pytestconfig.getoption("--megatron-core") or metadata.version("megatron-core")
    assert spawn_ranks(_version, 1, env=env) == [release]
