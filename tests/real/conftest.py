"""Fixtures of the tests on real megatron-core."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def teachers_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the demo's teachers: the first run trains and saves them, and the others load them."""
    return str(tmp_path_factory.mktemp("teachers"))
