"""The page of the head shows what the record of the kernels has, and what follows from it."""

from __future__ import annotations

import json

from tests.lab.kernels import page
from tests.lab.kernels.machine_code import MOST
from tests.lab.kernels.test_kernels import most_error


def test_the_page_shows_its_record() -> None:
    record, counted = (json.loads(file.read_text("utf-8")) for file in (page.RECORD, page.COUNTED))
    shown = page.PAGE.read_text("utf-8")
    cases = [(case, function) for case, functions in MOST.items() for function in functions]
    assert [(row["case"], row["function"]) for row in record["kernels"]] == cases
    assert all(float(row["error"]) <= most_error(row["function"]) for row in record["kernels"])
    assert page.text(record, counted, shown) == shown, "run: python -m tests.lab.kernels.page"
