"""What README and landing page say in numbers, as the records have it; a test compares them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from docs.plots import DOCS, record, teacher_memory
from tests.lab.kernels import page
from tests.lab.rehearsal import stand_ins
from tests.references.heads import ALL_KEPT, BASE, DEFERRED, NOT_IN_PLACE, STOCK, Setup

SETUP = Setup(8192, 4096, 151936, torch.bfloat16)
#: What README and landing page say in numbers, with their conditions.
TEXT = """
Memory of a teacher with {billions:.0f} billion parameters: {built[0]} GB if it is built for training,
{built[1]} GB with the distributed optimizer over 8 replicas, {built[2]} GB with DDP and without an
optimizer, {built[3]} GB if it is inference-only

{built[3]} GB instead of {built[0]} GB for a teacher that only scores This is estimated for {billions:.0f}
billion parameters in bfloat16 on one GPU

takes gradient buffers, main parameters and Adam's moments, {others} the memory of its weights

For small models, the estimate is within {percent:.1f}% of measured memory

Peak of output layer and loss over the vocabulary: at {ids:,} ids, stock code of slime takes {stock.gib:.1f}
GiB, lean-loss {loss.gib:.1f} GiB, and lean-head {least.gib:.1f} to {most.gib:.1f} GiB

Counted for a GPU, not run on one: {tokens:,} tokens, hidden size {hidden:,}, bfloat16, forward and
backward, without the gradients of hidden states and weight

{loss.ratio:.2f} × the logits instead of {stock.ratio:.2f} ×, with lean-loss This peak of slime's output
layer and loss is counted for a GPU, as in the plot, at {ids:,} ids. In verl it is {verl.ratio:.2f} ×. Its
time is predicted, not measured: {loss.ms} ms on an H100 at 763 TFLOP/s

{least.ratio:.2f} to {most.ratio:.2f} × the logits instead of {stock.ratio:.2f} ×, with lean-head This peak
is counted in the same way. It is {least.ratio:.2f} × if forward keeps no tile for backward, and
{most.ratio:.2f} × if it keeps all. Its predicted times are {least.ms} and {most.ms} ms

up to {products} matrix products of the output layer in place of {of_all}

less than {overhead} ms of a CPU per train()

{calls} calls of train() in one process, where stock Megatron allows 1
"""
_WORDS = {3: "three", 4: "four", 8: "eight times"}


def recorded() -> Iterator[tuple[str, Any]]:
    """Yield the numbers of :data:`TEXT`, each from its record."""
    counted, kernels = record("head_counted"), record("head_kernels")["kernels"]
    rows = {row["head"]: row for row in counted["heads"] + counted["stock"] if row["set-up"] == str(SETUP)}
    predicted = {row["head"]: row for row in page.predicted(counted, kernels) if row["set-up"] == str(SETUP)}
    heads = {"stock": STOCK, "loss": NOT_IN_PLACE, "verl": BASE, "least": DEFERRED, "most": ALL_KEPT}
    for name, head in heads.items():
        gib, ratio = map(float, rows[head]["beyond gradients"].split(" GiB, "))
        ms = predicted.get(stand_ins.NAMES[head], {}).get("763 TFLOP/s")
        yield name, SimpleNamespace(gib=gib, ratio=ratio, ms=ms)
    yield from {"tokens": SETUP.rows, "hidden": SETUP.hidden, "ids": SETUP.vocabulary}.items()
    products = [int(row["products"]) for row in counted["heads"] if row["head"] == DEFERRED]
    yield "products", _WORDS[math.ceil(max(n / ((n + 1) // 4) for n in products))]
    yield "of_all", _WORDS[int(rows[NOT_IN_PLACE]["products"])]
    teachers = [sum(parts.values()) for _, parts in teacher_memory()]
    weights = teacher_memory()[0][1]["weights"]
    yield "built", [f"{total:.1f}" for total in teachers]
    yield "billions", weights / 2
    yield "others", _WORDS[round(teachers[0] / weights, 3) - 1]
    measured = record("inference_memory")["memory"]
    differences = [float(row[key].rstrip("%")) for row in measured for key in row if "difference" in key]
    yield "percent", math.ceil(10 * max(map(abs, differences))) / 10
    calls = [row for row in record("overhead")["overhead"] if row["call"].startswith("train()")]
    yield "overhead", math.ceil(max(float(row["added (µs)"]) for row in calls) / 1000)
    test = (DOCS.parent / "tests" / "real" / "test_reentry.py").read_text("utf-8")
    yield "calls", max(map(int, re.findall(r"rollouts=(\d+)\)", test)))


def claims() -> list[str]:
    """Return each sentence with its numbers, without marks of Markdown."""
    return [" ".join(text.split()) for text in TEXT.format(**dict(recorded())).split("\n\n")]
