"""Writes what is compiled for GPUs, and the time that follows from it, into the page of the head.

``python -m tests.lab.kernels.page`` runs in an environment of ``make test-kernels``. The record is beside the
page. With ``--digests`` it records which kernels this torch generates for the head, and nothing else.

The prediction takes the counts of :mod:`tests.lab.rehearsal` and these assumptions about an H100: the rates
below; a pass over logits takes the longer of its bytes and its instructions; a product is slower where the
multiprocessors do not share its tiles of 128 x 256 evenly; half of reading and writing a sum is hidden.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from math import ceil
from typing import Any

import torch

from tests.lab.kernels.machine_code import DIGESTS, MOST, TORCH, WRITES_LOGITS, Kernel
from tests.lab.kernels.sources import MULTIPROCESSORS
from tests.lab.rehearsal import stand_ins
from tests.lab.rehearsal.stand_ins import COUNTED, NAMES, PAGE
from tests.references.heads import ALL_KEPT, DEFERRED, NOT_IN_PLACE
from tests.references.pages import fill, join, table

RECORD = PAGE.with_name("head_kernels.json")
# Each of the four schedulers of a multiprocessor issues so many instructions per cycle.
SMS, CLOCK, ISSUED = MULTIPROCESSORS[90], 1.6e9, 0.8
BYTES_PER_SECOND, SECONDS_OF_SMALL_KERNEL = 3.0e12, 2.5e-6
RATES = (798e12, 763e12, 728e12, 680e12)  # products, per second
#: The case whose kernels a head runs, and the bytes of a logit that statistics, gradient, conversions move.
PASSES = {
    NOT_IN_PLACE: ("materialized, float32", 4, 8, 12),
    **dict.fromkeys((DEFERRED, ALL_KEPT), ("head", 2, 4, 0)),
}
PREDICTED = (
    *(("[8192, 4096] × 151936, bfloat16", head) for head in PASSES),
    *((f"[{n}, 4096] × 131072, bfloat16", DEFERRED) for n in (8192, 4096)),
)


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


def most_error(function: str) -> float:
    return 1e-6 if function in WRITES_LOGITS else 5e-7


def errors(case: str, sources: dict[str, Any]) -> dict[str, float]:
    """Return the largest error of each function in triton's interpreter."""
    output = stand_ins.run("tests.lab.kernels.interpreted", case, stdin=json.dumps(sources))
    values: dict[str, float] = json.loads(output.splitlines()[-1])
    return values


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


def predicted(counted: dict[str, Any], kernels: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """Return the milliseconds of forward and backward of log-probs and entropies, in bfloat16."""
    on_h100 = {(row["case"], row["function"]): float(row["sm_90"]) for row in kernels}
    rows = []
    for setup, head in PREDICTED:
        [row] = (row for row in counted["heads"] if (row["set-up"], row["head"]) == (setup, head))
        times = [1e3 * _seconds(row, rate, on_h100) for rate in RATES]
        rows.append(
            {"set-up": setup, "head": NAMES[head]}
            | {"products": row["products"], "peak": row["beyond gradients"]}
            | {f"{rate / 1e12:.0f} TFLOP/s": f"{ms:.1f}" for rate, ms in zip(RATES, times, strict=True)}
        )
    return rows


def _seconds(row: dict[str, Any], rate: float, instructions: dict[tuple[str, str], float]) -> float:
    n, hidden, vocabulary = map(int, re.findall(r"\d+(?=[],])", row["set-up"]))
    logits, is_again = n * vocabulary, row["head"] == DEFERRED
    # Backward computes all tiles but the last one again; a tile takes three products besides.
    tiles = (int(row["products"]) + is_again) // (3 + is_again)
    columns = vocabulary // tiles
    product, even = 2 * logits * hidden / rate, _balance(8192, 8192)  # the shape whose rate was measured
    # How often all logits are computed, and the gradients of hidden states and weight.
    shapes = (1 + is_again * (1 - 1 / tiles), n, columns), (1, n, hidden), (1, columns, hidden)
    products = sum(number * product / min(1.0, _balance(*shape) / even) for number, *shape in shapes)
    sums = tiles * n * hidden * 4 / BYTES_PER_SECOND
    small = int(row["small operations"]) * SECONDS_OF_SMALL_KERNEL
    case, *moved, converted = PASSES[row["head"]]
    functions = zip(moved, ("block_statistics", "block_gradient"), strict=True)
    passes = sum(_pass(logits, size, instructions[case, name]) for size, name in functions)
    return products + sums + passes + small + _pass(logits, converted, 0)


def _pass(logits: int, bytes_of_each: int, instructions: float) -> float:
    issued = SMS * 4 * 32 * CLOCK * ISSUED
    return max(logits * bytes_of_each / BYTES_PER_SECOND, logits * instructions / issued)


def _balance(rows: int, columns: int) -> float:
    """Return which share of the multiprocessors works, on average, on a product with such a result."""
    waves = ceil(rows / 128) * ceil(columns / 256) / SMS
    return waves / ceil(waves)


def text(record: dict[str, Any], counted: dict[str, Any], page: str) -> str:
    kernels = join(f"Compiled by torch {record['torch']}:", table(record["kernels"]))
    times = table(predicted(counted, record["kernels"]))
    return fill(page, {"kernels": kernels, "predicted": times}, kind="compiled")


if __name__ == "__main__":
    if "--digests" in sys.argv:
        recorded = {**json.loads(DIGESTS.read_text()), TORCH: compile_case("head")["digests"]}
        DIGESTS.write_text(json.dumps(recorded, indent=1) + "\n")
        sys.exit()
    record = measured()
    RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    counted = json.loads(COUNTED.read_text("utf-8"))
    PAGE.write_text(text(record, counted, PAGE.read_text("utf-8")), "utf-8")
