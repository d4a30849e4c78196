"""Writes what is compiled for GPUs into the page of the head.

``python -m tests.lab.kernels.page`` runs in an environment of ``make test-kernels``. The record is beside the
page. With ``--digests`` it records which kernels this torch generates for the head, and nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import torch

from tests.lab.kernels.machine_code import DIGESTS, MOST, TORCH, Kernel
from tests.lab.kernels.pretended_gpu import MULTIPROCESSORS
from tests.lab.kernels.test_kernels import compile_case, errors
from tests.lab.rehearsal.stand_ins import PAGE
from tests.references.pages import fill, join, table

RECORD = PAGE.with_name("head_kernels.json")


def fastest(kernels: Iterable[Kernel]) -> Kernel:
    """Return the configuration with the fewest instructions of those that are fast enough."""
    return min((kernel for kernel in kernels if kernel.is_fast()), key=lambda kernel: kernel.per_element)


def measured() -> dict[str, Any]:
    rows = []
    for case, functions in MOST.items():
        compiled = compile_case(case, "--all")
        kernels, error = compiled["kernels"], errors(case, compiled["sources"])
        for function in functions:
            best = {number: fastest(kernels[function, number]) for number in MULTIPROCESSORS}
            rows.append(
                {"case": case, "function": function}
                | {f"sm_{number}": f"{kernel.per_element}" for number, kernel in best.items()}
                | {"registers": " / ".join(str(kernel.registers) for kernel in best.values())}
                | {"loads of 16 bytes": f"{best[90].wide_loads:.0f} bytes"}
                | {"widest store": f"{best[90].widest_store} bytes", "error": f"{error[function]:.0e}"}
            )
    return {"torch": torch.__version__, "kernels": rows}


def text(record: dict[str, Any], page: str) -> str:
    kernels = join(f"Compiled by torch {record['torch']}:", table(record["kernels"]))
    return fill(page, {"kernels": kernels}, kind="compiled")


def record_digests() -> None:
    recorded = {**json.loads(DIGESTS.read_text()), TORCH: compile_case("head")["digests"]}
    DIGESTS.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    if "--digests" in sys.argv:
        record_digests()
        sys.exit()
    record = measured()
    RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    PAGE.write_text(text(record, PAGE.read_text("utf-8")), "utf-8")
