"""The kernels that read logits, compiled for GPUs that are not here: ``make test-kernels``; and their page.

They need a torch that is built with CUDA, whose triton has an assembler and a disassembler, and no GPU.
"""

import json
from itertools import product

import pytest

from tests.lab.kernels import page
from tests.lab.kernels.machine_code import MOST, recorded_digests
from tests.lab.kernels.sources import MULTIPROCESSORS


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("case", list(reversed(MOST)))  # the compiler takes longest for the last one
def test_kernels(case: str) -> None:
    """A configuration is fast enough, and the interpreter computes what float64 does.

    On a GPU, the compiler measures all configurations and takes the fastest one.
    """
    compiled = page.compile_case(case)
    kernels = compiled["kernels"]
    assert kernels.keys() == set(product(MOST[case], MULTIPROCESSORS))
    for configurations in kernels.values():
        assert any(kernel.is_fast() for kernel in configurations), configurations
    if case == "head" and (recorded := recorded_digests()):  # not of a torch that is newer than the record
        assert set(compiled["digests"]) == recorded, "run: python -m tests.lab.kernels.page --digests"
    for function, error in page.errors(case, compiled["sources"]).items():
        assert error < page.most_error(function), function


def test_the_page_shows_its_record() -> None:
    record, counted = (json.loads(file.read_text("utf-8")) for file in (page.RECORD, page.COUNTED))
    shown = page.PAGE.read_text("utf-8")
    cases = [(case, function) for case, functions in MOST.items() for function in functions]
    assert [(row["case"], row["function"]) for row in record["kernels"]] == cases
    assert all(float(row["error"]) <= page.most_error(row["function"]) for row in record["kernels"])
    assert page.text(record, counted, shown) == shown, "run: python -m tests.lab.kernels.page"
