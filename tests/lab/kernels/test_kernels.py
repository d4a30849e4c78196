"""The kernels that read logits, compiled for GPUs that are not here: ``make test-kernels``.

They need a torch that is built with CUDA, whose triton has an assembler and a disassembler, and no GPU.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from itertools import product

import pytest
import torch

from tests.lab.kernels.machine_code import MOST, Kernel, recorded_digests
from tests.lab.kernels.pretended_gpu import MULTIPROCESSORS
from tests.lab.rehearsal import stand_ins

pytestmark = [pytest.mark.nightly, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _has_compiler() -> None:
    if torch.version.cuda is None:
        pytest.skip("torch is not built with CUDA")
    if torch.cuda.is_available() or not shutil.which("cc"):
        pytest.skip("there is a GPU, or no C compiler")


def compile_case(case: str, *options: str) -> tuple[dict[tuple[str, int], list[Kernel]], set[str]]:
    """Return the configurations of what reads logits, by function and GPU, and the digests of all kernels."""
    # The libraries keep kernels from starting; code is generated all the same.
    variables = {"TORCHDYNAMO_DISABLE": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    output = stand_ins.run_with_libraries("tests.lab.kernels.machine_code", case, *options, **variables)
    printed, kernels = json.loads(output.splitlines()[-1]), defaultdict(list)
    for values in printed["kernels"]:
        kernel = Kernel(**values)
        kernels[kernel.function, kernel.capability].append(kernel)
    return kernels, set(printed["digests"])


@pytest.mark.parametrize("case", list(reversed(MOST)))  # the compiler takes longest for the last one
def test_a_configuration_is_fast_enough(case: str) -> None:
    """The compiler measures the configurations on the GPU, and takes the fastest."""
    kernels, digests = compile_case(case)
    assert kernels.keys() == set(product(MOST[case], MULTIPROCESSORS))
    for configurations in kernels.values():
        assert any(kernel.is_fast() for kernel in configurations), configurations
    if case == "head" and (recorded := recorded_digests()):  # not of a torch that is newer than the record
        assert digests == recorded, "run: python -m tests.lab.kernels.page --digests"


def test_the_interpreter_computes_what_float64_does() -> None:
    """It counts loads, too: one of each logit, and in statistics another one in the row's largest stretch."""
    errors = json.loads(stand_ins.run("tests.lab.kernels.interpreted").splitlines()[-1])
    assert errors["statistics"]["float32"] < 5e-7 and errors["statistics"]["bfloat16"] < 5e-7
    # The interpreter cuts numbers off to bfloat16, which a GPU rounds.
    assert errors["gradient"]["float32"] < 1e-6 and errors["gradient"]["bfloat16"] < 2**-7
