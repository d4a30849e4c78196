"""The megatron-core that everything here runs on is the one that was asked for."""

from __future__ import annotations

from importlib import metadata

import pytest

from megatron_rl_patches.testing import cpu_backend, spawn_ranks


def _version() -> str:
    with cpu_backend():
        import megatron.core

        return megatron.core.__version__.partition("+")[0]


@pytest.mark.parametrize("env", [{}, {"FRESH": "1"}], ids=["forked", "fresh"])
def test_ranks_have_the_release_that_was_asked_for(pytestconfig: pytest.Config, env: dict[str, str]) -> None:
    release = pytestconfig.getoption("--megatron-core") or metadata.version("megatron-core")
    assert spawn_ranks(_version, 1, env=env) == [release]
