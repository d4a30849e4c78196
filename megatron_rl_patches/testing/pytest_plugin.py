"""Pytest fixtures of this package. Pytest loads them itself, so they load neither torch nor megatron."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from . import MockDDP, cpu_backend, spawn_ranks


@pytest.fixture
def megatron_cpu() -> Iterator[None]:
    """Run the test inside :func:`~megatron_rl_patches.testing.cpu_backend`."""
    with cpu_backend():
        yield


@pytest.fixture
def mock_ddp() -> type[MockDDP]:
    """Make model chunks: ``mock_ddp(overlap_param_gather=False)``. See :class:`MockDDP` for the arguments."""
    return MockDDP


@pytest.fixture
def gloo_ranks() -> Callable[..., list[Any]]:
    """Run a function on gloo ranks: ``gloo_ranks(function, 2, timeout=60)``. See :func:`spawn_ranks`."""
    return spawn_ranks
