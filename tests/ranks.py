"""Tests that run on ranks: ``@on_ranks(2)`` is the marker of the package's plugin of pytest."""

from collections.abc import Container, Iterable
from typing import Any

import pytest
import torch.distributed as dist

from tests import layers as layers  # before Megatron

on_ranks = pytest.mark.ranks


def by_speed(cases: Iterable[str], fast: Container[str], nightly: Container[str] = ()) -> list[Any]:
    """Return names of cases for ``parametrize``: all but the fast ones are slow tests, or nightly ones."""
    marks = pytest.mark.slow, pytest.mark.nightly
    return [pytest.param(name, marks=[] if name in fast else marks[name in nightly]) for name in cases]


def everywhere(value: Any, group: Any = None) -> list[Any]:
    """Return the values of all ranks of a group, on each of them."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
