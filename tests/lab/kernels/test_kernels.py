"""The kernels that read logits, compiled for GPUs that are not here: ``make test-kernels``.

They need a torch that is built with CUDA, whose triton has an assembler and a disassembler, and no GPU.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lab.kernels.machine_code import Kernel, digests, recorded_digests
from tests.lab.kernels.pretended_gpu import MULTIPROCESSORS
from tests.lab.rehearsal import stand_ins

pytestmark = [pytest.mark.nightly, pytest.mark.slow]

STATISTICS, GRADIENT = "block_statistics", "block_gradient"
#: The most instructions for each logit, or for each pair of logits.
MOST = {
    ("head", STATISTICS): 22,
    ("head", GRADIENT): 26,
    ("head, log-probs", STATISTICS): 22,
    ("head, log-probs", GRADIENT): 26,
    (
        "materialized, float32",
        STATISTICS,
    ): 30,  # stretches of 128 columns, which is what divides the vocabulary
    ("materialized, float32", GRADIENT): 26,
    ("materialized, float32, keep-mask", STATISTICS): 40,  # two softmaxes
    ("materialized, float32, keep-mask", GRADIENT): 40,
    ("reverse_kl", "_conditional_parts"): 100,
    ("reverse_kl", "_block_derivative"): 35,
    ("forward_kl", "_conditional_parts"): 100,
    ("forward_kl", "_block_derivative"): 120,
    ("jensen_shannon", "_normalizers"): 22,
    ("jensen_shannon", "_sums"): 220,
    ("jensen_shannon", "_block_derivative"): 120,
}


@pytest.fixture(scope="module", autouse=True)
def _has_compiler() -> None:
    if torch.version.cuda is None:
        pytest.skip("torch is not built with CUDA")
    if torch.cuda.is_available() or not shutil.which("cc"):
        pytest.skip("there is a GPU, or no C compiler")


def printed_by(module: str, *arguments: str) -> Any:
    """Run a module of this folder, and return what it prints as JSON."""
    return json.loads(stand_ins.run(f"tests.lab.kernels.{module}", *arguments).splitlines()[-1])


def compile_case(case: str, folder: str) -> dict[tuple[str, int], list[Kernel]]:
    """Return the configurations of the kernels that read logits, by function and GPU."""
    # The libraries keep kernels from starting; code is generated all the same.
    variables = {"TORCHDYNAMO_DISABLE": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    stand_ins.run_with_libraries("tests.lab.kernels.sources", folder, case, **variables)
    kernels = defaultdict(list)
    for values in printed_by("machine_code", folder, *map(str, MULTIPROCESSORS)):
        kernel = Kernel(**values)
        kernels[kernel.function, kernel.capability].append(kernel)
    return kernels


@pytest.mark.parametrize("case", dict.fromkeys(case for case, _ in MOST))
def test_a_configuration_is_fast_enough(case: str, tmp_path: Path) -> None:
    """The compiler measures the configurations on the GPU, and takes the fastest."""
    kernels = compile_case(case, str(tmp_path))
    most = {function: number for (name, function), number in MOST.items() if name == case}
    assert kernels.keys() == set(product(most, MULTIPROCESSORS))
    for (function, _), configurations in kernels.items():
        assert any(is_fast(kernel, most[function]) for kernel in configurations), configurations
    if case == "head" and (recorded := recorded_digests()):  # not of a torch that is newer than the record
        assert digests_in(tmp_path) == recorded, "run: python -m tests.lab.kernels.page --digests"


def digests_in(folder: Path) -> set[str]:
    return {digest for file in folder.glob("*.*.py") for digest in digests(file.read_text())}


def is_fast(kernel: Kernel, most: int) -> bool:
    writes_logits = kernel.function in (GRADIENT, "_block_derivative")
    return (
        kernel.spilled == 0
        and kernel.per_element <= most
        and kernel.widest_load == 16
        and (kernel.widest_store == 16 or not writes_logits)
        and (
            not kernel.has_loop or "R0_BLOCK 1024" in kernel.configuration
        )  # a loop that ends after one step
    )


def test_the_interpreter_computes_what_float64_does() -> None:
    """It counts loads, too: one of each logit, and in statistics another one in the row's largest stretch."""
    errors = printed_by("interpreted")
    assert errors["statistics"]["float32"] < 5e-7 and errors["statistics"]["bfloat16"] < 5e-7
    # The interpreter cuts numbers off to bfloat16, which a GPU rounds.
    assert errors["gradient"]["float32"] < 1e-6 and errors["gradient"]["bfloat16"] < 2**-7
