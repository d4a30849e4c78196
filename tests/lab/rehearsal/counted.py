"""What the head takes at sizes that others have published, counted: a part of its page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl_patches.losses import deferred_logits, vocab_parallel_log_probs_and_entropy
from tests.lab.rehearsal.recorder import recording
from tests.references.heads import BASE, DEFERRED, KEPT, Setup, share_of_logits
from tests.references.pages import join, table

SETUPS = Setup(8192, 4096, 151936, torch.bfloat16), Setup(4096, 4096, 131072, torch.bfloat16)


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return logits in float32, as Megatron returns them."""
    return (hidden @ weight.T).float()


def deferred_keeping(share: float, hidden: Tensor, weight: Tensor) -> Tensor:
    return deferred_logits(hidden, weight, keep_bytes=share_of_logits(len(hidden), weight, share))


PLAIN = f"{DEFERRED}, plain operators"
HEADS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], dict[str, Any]]] = {
    BASE: (logits_of, {"inplace_backward": True}),
    DEFERRED: (deferred_logits, {}),
    PLAIN: (deferred_logits, {"fused": False}),
    **{name: (partial(deferred_keeping, share), {}) for name, share in KEPT.items()},
}


@dataclass
class Count:
    """Bytes of a step at its peak, beyond its inputs and gradients; and what was called how often."""

    peak: int
    inputs: int
    products: Counter[str]
    row_passes: Counter[str]


def count(setup: Setup, head: str, compiling_fails: bool = False) -> Count:
    """Count log-probabilities and entropies at a temperature, forward and backward, of all rows."""
    make, options = HEADS[head]
    with recording(compiling_fails=compiling_fails) as recorder:
        shapes = (setup.rows, setup.hidden), (setup.vocabulary, setup.hidden)
        hidden, weight = (
            torch.empty(shape, device="cuda", dtype=setup.dtype, requires_grad=True) for shape in shapes
        )
        targets = torch.zeros(setup.rows, device="cuda", dtype=torch.int64)
        values = vocab_parallel_log_probs_and_entropy(
            make(hidden, weight), targets, temperature=0.8, **options
        )
        sum(value.sum() for value in values).backward()
        assert not recorder.waits
        inputs = hidden.nbytes + weight.nbytes
        return Count(recorder.peak - 2 * inputs, inputs, recorder.products, recorder.row_passes)


def part() -> str:
    """Return the part of the page, in Markdown."""
    counts = {(setup, head): count(setup, head) for setup in SETUPS for head in HEADS}
    return join(table(_memory(counts)), table(_products(counts)))


def where_compiling_fails() -> list[tuple[int, dict[str, int]]]:
    """Return peak and row passes where the compiler fails, and those of plain operators."""
    setup = SETUPS[1]
    counts = count(setup, DEFERRED, compiling_fails=True), count(setup, PLAIN)
    return [(counted.peak, counted.row_passes) for counted in counts]


def _memory(counts: dict[tuple[Setup, str], Count]) -> Iterator[dict[str, str]]:
    for (setup, head), counted in counts.items():
        gib = partial(_gib, setup)
        yield {
            "setup": str(setup),
            "head": head,
            "beyond gradients": gib(counted.peak),
            "with gradients": gib(counted.peak + counted.inputs),
            "with inputs and gradients": gib(counted.peak + 2 * counted.inputs),
            "products": str(counted.products.total()),
            "row passes": ", ".join(f"{n} × `{name}`" for name, n in counted.row_passes.items()),
        }


def _gib(setup: Setup, nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB, {nbytes / setup.logits_bytes:.3f}"


def _products(counts: dict[tuple[Setup, str], Count]) -> Iterator[dict[str, str]]:
    for setup in SETUPS:
        for shapes, number in counts[setup, DEFERRED].products.items():
            yield {"setup": str(setup), "products, deferred": shapes, "how often": str(number)}
