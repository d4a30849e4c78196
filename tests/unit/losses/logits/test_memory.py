"""Beyond the caller's logits: the gradient and one block of rows, or one block of rows alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.losses import (
    vocab_parallel_log_probs,
    vocab_parallel_log_probs_and_entropy,
    vocab_parallel_log_probs_at,
)
from tests.references.live_bytes import live_bytes


def log_probs(*args: Any, **options: Any) -> Tensor:
    return vocab_parallel_log_probs(*args, **options).sum()


def entropy(*args: Any, **options: Any) -> Tensor:
    return torch.stack(vocab_parallel_log_probs_and_entropy(*args, **options)).sum()


def entropy_without_gradient(*args: Any, **options: Any) -> Tensor:
    return vocab_parallel_log_probs_and_entropy(*args, entropy_grad=False, **options)[0].sum()


def at(*args: Any, **options: Any) -> Tensor:
    return sum(values.sum() for values in vocab_parallel_log_probs_at(*args, with_tail=True, **options))


#: ``scattered`` rows, all columns ``kept``, and ``k`` ids are made of a case's own sizes.
MODES: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "log_probs": (log_probs, {}),
    "log_probs_at_temperature": (log_probs, {"temperature": 0.7}),
    "kept_log_probs": (log_probs, {"kept": True}),
    "entropy_without_gradient": (entropy_without_gradient, {}),
    "entropy": (entropy, {"temperature": 0.7}),
    "kept_entropy": (entropy, {"kept": True}),
    "entropy_of_a_range": (entropy, {"rows": slice(50, 200)}),
    "entropy_of_scattered_rows": (entropy, {"scattered": True}),
    "log_probs_of_scattered_rows": (log_probs, {"scattered": True}),
}
MODES_AT: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "at": (at, {"k": 16}),
    "at_temperature": (at, {"k": 16, "temperature": 0.7}),
    "at_many": (at, {"k": 64}),
}
# Rows, columns and block_bytes: the block that large logits get by default is 1% of them at most.
SHAPES = [
    pytest.param((256, 16384, 1 << 17), id="small"),
    pytest.param((2048, 32768, None), id="A", marks=pytest.mark.slow),
    pytest.param((1024, 151936, None), id="B", marks=pytest.mark.slow),
]


class Case:
    def __init__(
        self, rows: int, columns: int, block_bytes: int | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(0)
        self.block_bytes = block_bytes
        self.leaf = torch.randn(rows, columns).to(dtype).requires_grad_()
        self.targets = torch.randint(columns, (rows,))

    def peak(self, mode: str, **options: Any) -> float:
        """Of forward and backward, over the bytes of the logits."""
        loss, mode_options = (MODES | MODES_AT)[mode]
        options = {"block_bytes": self.block_bytes, **mode_options, **options}
        (rows, columns), logits = self.leaf.shape, self.leaf * 1
        if options.pop("kept", False):
            options["keep_mask"] = torch.ones(rows, columns, dtype=torch.bool).tril()
        if options.pop("scattered", False):
            options["rows"] = torch.arange(rows).view(-1, 4)[:, :3].flatten()
        k = options.pop("k", None)
        ids = torch.randint(columns, (rows, k)) if k else self.targets[options.get("rows", slice(None))]
        step = live_bytes(lambda: torch.autograd.grad(loss(logits, ids, **options), logits)[0])
        return step.peak / logits.nbytes


@pytest.fixture(scope="module", params=SHAPES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


@pytest.mark.parametrize("mode", [*MODES, *MODES_AT])
def test_plain(mode: str, case: Case) -> None:
    options: dict[str, Any] = {} if mode in MODES_AT else {"fused": False}
    assert 1.0 <= case.peak(mode, **options) <= 1.02
    assert case.peak(mode, inplace_backward=True, **options) <= 0.02


@pytest.mark.parametrize(("loss", "targets"), [(entropy, (512,)), (at, (512, 8))])
def test_forward_keeps_a_few_numbers_per_row(loss: Any, targets: tuple[int, ...]) -> None:
    logits, ids = torch.randn(512, 8192, requires_grad=True), torch.randint(8192, targets)
    assert live_bytes(lambda: loss(logits, ids)).retained <= 512 * 100


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, when inductor is imported
@pytest.mark.parametrize("mode", MODES)
def test_compiled(mode: str, case: Case) -> None:
    case.peak(mode, fused=True)  # compiles
    assert 1.0 <= case.peak(mode, fused=True) <= 1.02
    case.peak(mode, fused=True, inplace_backward=True)
    assert case.peak(mode, fused=True, inplace_backward=True) <= 0.02


def test_compiling_switched_off_costs_a_few_blocks() -> None:
    """As in tests that run Megatron on a CPU: what would be compiled runs as Python, a block at a time."""
    case = Case(256, 16384, 1 << 17)
    with torch.compiler.set_stance("force_eager"):
        assert case.peak("entropy", inplace_backward=True, fused=True) <= 0.06


@pytest.mark.parametrize("block_bytes", [1 << 18, 1 << 20])
def test_the_block_is_of_the_size_asked_for(block_bytes: int) -> None:
    case = Case(256, 16384)
    peak = case.peak("kept_entropy", fused=False, inplace_backward=True, block_bytes=block_bytes)
    assert 0.8 * block_bytes <= peak * case.leaf.nbytes <= 1.2 * block_bytes


def test_half_precision_needs_no_float32_copy() -> None:
    case = Case(256, 16384, 1 << 17, torch.bfloat16)
    assert 1.0 <= case.peak("entropy", fused=False) <= 1.03
    assert case.peak("entropy", fused=False, inplace_backward=True) <= 0.03
