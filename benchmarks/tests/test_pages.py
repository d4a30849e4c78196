"""Benchmarks fill the places of their pages, and say why a function of another framework is left out."""

from __future__ import annotations

import re

import pytest

from benchmarks.candidates import calls
from benchmarks.head import OTHERS
from benchmarks.page import fill, left_out
from benchmarks.run import DOCS, NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_page_stays_as_it_is_where_nothing_was_measured_anew(name: str) -> None:
    page = (DOCS / "benchmarks" / f"{name}.md").read_text("utf-8")
    places = dict(re.findall(r"<!-- measured: (.+?) -->\n\n(.*?)\n\n<!-- end -->\n", page, re.DOTALL))

    assert "machine" in places and len(places) == page.count("<!-- ") / 2
    assert fill(page, places) == page
    with pytest.raises(ValueError, match="no place for what was measured: other"):
        fill(page, {"other": ""})


def test_a_head_that_cannot_be_loaded_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = ("NEMO_RL_DIR", "SKYRL_DIR", "TRL_DIR")
    for variable in variables:
        monkeypatch.delenv(variable, raising=False)

    reasons: dict[str, str] = {}
    loaded = calls(OTHERS, lambda head: pytest.fail("no head is called"), reasons)

    assert not loaded
    assert list(reasons) == [candidate.name for candidate in OTHERS]
    for variable in variables:
        assert f"{variable} not set" in left_out(reasons)
