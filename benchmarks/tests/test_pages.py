"""Benchmarks fill the places of their pages, and say why a function of another framework is left out."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.candidates import calls
from benchmarks.head import OTHERS
from benchmarks.measure import Cost, Result, left_out, rows
from benchmarks.page import Table, as_json, filled
from benchmarks.run import DOCS, NAMES
from tests.references.heads import Setup

#: The rehearsal on fake CUDA tensors fills this place, and tests of kernels fill those of what is compiled.
COUNTED = "counted"
OTHERS_FILL = re.compile(rf"<!-- (?:compiled: .+?|measured: {COUNTED}) -->.*?<!-- end -->\n", re.DOTALL)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_rows_of_its_json_file(name: str) -> None:
    file = DOCS / "benchmarks" / f"{name}.md"
    page, record = file.read_text("utf-8"), json.loads(file.with_suffix(".json").read_text("utf-8"))
    places = dict(re.findall(r"<!-- measured: (.+?) -->\n\n(.*?)\n\n<!-- end -->\n", page, re.DOTALL))
    assert "machine" in places and len(places) == page.count("<!-- measured: ")
    assert f"]({name}.json)" in page and OTHERS_FILL.sub("", page).count("\n| --- |") == 1, "one table"
    tables = {}
    for place, text in places.items():
        part = record.get(place.partition(":")[0])
        if isinstance(part, str):
            assert text == part
        elif place != COUNTED:
            title = place.partition(": ")[2]
            part = [row for row in part if title in row.values()] or part
            header, _, *lines = (
                [cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines()
            )
            for line in lines:
                shown = {title: cell for title, cell in zip(header, line, strict=True) if cell != "–"}
                assert any(shown.items() <= row.items() for row in part), (place, line)
            tables[place.partition(":")[0]] = Table(3, record[place.partition(":")[0]])
    # What was measured once more, and gave the same numbers.
    assert filled(page, record | tables) == page


def test_a_table_keeps_its_rows_and_columns_when_it_is_measured_anew() -> None:
    page = "<!-- measured: {} -->\n\n| what | ms |\n| --- | --- |\n| b | {} |\n| c | {} |\n\n<!-- end -->\n"
    table = Table(1, [{"what": "a", "bytes": "1", "ms": "2"}, {"what": "b", "bytes": "3", "ms": "4"}])
    for place in ("costs", "costs: time"):
        assert filled(page.format(place, 9, 9), {"costs": table}) == page.format(place, 4, "–")
    modes = Table(2, [{"mode": mode, "what": "b", "ms": ms} for mode, ms in (("x", "5"), ("y", "6"))])
    assert filled(page.format("costs: x", 9, 9), {"costs": modes}) == page.format("costs: x", 5, "–")
    assert filled(page.format("others", 9, 9), {"costs": table}) == page.format("others", 9, 9)
    empty = filled("<!-- measured: costs -->\n\n<!-- end -->\n", {"costs": table})
    assert empty.splitlines()[2] == "| what | bytes | ms |" and empty.count("\n| ") == 4
    assert json.loads(as_json({"costs": table, "peers": "x"})) == {"costs": table.rows, "peers": "x"}


def test_rows_have_costs_in_units_and_as_they_are() -> None:
    result = Result(
        Setup(16, 4, 16384), "other", {"mode": {"ours": Cost(3.0, 1 << 19, (0.5,))}}, {"x": "why"}
    )
    [row] = rows([result], "mode", "way", {"error": ".0e", "more": ".0e"}).rows
    assert row.pop("set-up") == str(result.setup)
    assert row == {
        "mode": "mode",
        "way": "ours",
        "memory": "0.500",
        "MiB": "0.5",
        "time": "–",
        "ms": "3.0",
        "error": "5e-01",
    }
    assert left_out([result]).rows == [{"set-up": str(result.setup), "left out": "x", "why": "why"}]


def test_a_head_that_cannot_be_loaded_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: dict[str, str] = {}
    for variable in ("NEMO_RL_DIR", "SKYRL_DIR", "TRL_DIR"):
        monkeypatch.delenv(variable, raising=False)
        calls(OTHERS, lambda head: pytest.fail("no head is called"), reasons)
        assert f"{variable} not set" in str(reasons)
    assert list(reasons) == [candidate.name for candidate in OTHERS]
