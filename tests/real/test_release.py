"""All tests of this folder run on the megatron-core that ``--megatron-core`` names."""

from __future__ import annotations

from importlib import metadata

import megatron.core
import pytest

from tests.ranks import on_ranks


def _assert_release(release: str) -> None:
    assert megatron.core.__version__.partition("+")[0] == release


@pytest.fixture
def release(pytestconfig: pytest.Config) -> str:
    return pytestconfig.getoption("--megatron-core") or metadata.version("megatron-core")


@on_ranks(1)
def test_forked_ranks_import_the_release_of_the_option(release: str) -> None:
    _assert_release(release)


@pytest.mark.slow
@on_ranks(1, env={"FRESH": "1"})
def test_fresh_ranks_import_it_too(release: str) -> None:
    _assert_release(release)
