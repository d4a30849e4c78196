"""The kernels that read logits, compiled for GPUs that are not here: ``make test-kernels``.

They need a torch that is built with CUDA, whose triton has an assembler and a disassembler, and no GPU.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from itertools import product
from typing import Any

import pytest
import torch

from tests.lab.kernels.machine_code import MOST, WRITES_LOGITS, Kernel, recorded_digests
from tests.lab.kernels.pretended_gpu import MULTIPROCESSORS
from tests.lab.rehearsal import stand_ins

pytestmark = [pytest.mark.nightly, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _has_compiler() -> None:
    if torch.version.cuda is None:
        pytest.skip("torch is not built with CUDA")
    if torch.cuda.is_available() or not shutil.which("cc"):
        pytest.skip("there is a GPU, or no C compiler")


def compile_case(case: str, *options: str) -> dict[str, Any]:
    """Return what :mod:`.machine_code` prints, with the configurations by function and GPU."""
    # The libraries keep kernels from starting; code is generated all the same.
    variables = {"TORCHDYNAMO_DISABLE": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    output = stand_ins.run_with_libraries("tests.lab.kernels.machine_code", case, *options, **variables)
    compiled, kernels = json.loads(output.splitlines()[-1]), defaultdict(list)
    for values in compiled["kernels"]:
        kernel = Kernel(**values)
        kernels[kernel.function, kernel.capability].append(kernel)
    return {**compiled, "kernels": kernels}


@pytest.mark.parametrize("case", list(reversed(MOST)))  # the compiler takes longest for the last one
def test_kernels(case: str) -> None:
    """A configuration is fast enough, and the interpreter computes what float64 does.

    On a GPU, the compiler measures all configurations and takes the fastest one.
    """
    compiled = compile_case(case)
    kernels = compiled["kernels"]
    assert kernels.keys() == set(product(MOST[case], MULTIPROCESSORS))
    for configurations in kernels.values():
        assert any(kernel.is_fast() for kernel in configurations), configurations
    if case == "head" and (recorded := recorded_digests()):  # not of a torch that is newer than the record
        assert set(compiled["digests"]) == recorded, "run: python -m tests.lab.kernels.page --digests"
    for function, error in errors(case, compiled["sources"]).items():
        assert error < most_error(function), function


def most_error(function: str) -> float:
    return 1e-6 if function in WRITES_LOGITS else 5e-7


def errors(case: str, sources: dict[str, Any]) -> dict[str, float]:
    """Return the largest error of each function in triton's interpreter."""
    output = stand_ins.run("tests.lab.kernels.interpreted", case, stdin=json.dumps(sources))
    values: dict[str, float] = json.loads(output.splitlines()[-1])
    return values
