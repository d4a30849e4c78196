"""Fixtures of Megatron-LM's conftest, for where that conftest cannot be imported for want of a package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def reset_env_vars() -> Iterator[None]:
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def experimental(request: pytest.FixtureRequest) -> None:
    from megatron.core import config

    config.ENABLE_EXPERIMENTAL = request.config.option.experimental


@pytest.fixture(scope="session")
def tmp_path_dist_ckpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that the ranks share; it goes away with them."""
    folder = tmp_path_factory.getbasetemp().parent / "tmp_dist_ckpt"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="class")
def tmp_dir_per_class(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")
