"""How often the package's modules call each other in a loss does not grow."""

from __future__ import annotations

import pytest

from tests.lab.walks import MOST, WALKS, stays_of


@pytest.mark.parametrize("name", WALKS)
def test_walks_stay_short(name: str) -> None:
    assert len(stays_of(WALKS[name])) <= MOST[name]
