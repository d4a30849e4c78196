"""The kernels of ``torch.compile`` give what the plain operators give, and stay away where they cannot be.

Each case compiles two kernels, a second or two each, so there are few, and each is used often.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import _fused, vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy

from .dense import IGNORE, errors
from .test_vocab_parallel import EXTREMES, FLOAT32, GRADIENT_BOUND, KEEP, T, V, random_logits, random_targets

# torch itself warns when inductor is imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler"
)


@pytest.fixture
def forget_kernels() -> Iterator[None]:
    with mock.patch.dict(_fused._compiled, clear=True), mock.patch.dict(_fused._cannot, clear=True):
        yield


def check(logits: Tensor, targets: Tensor, **options: Any) -> None:
    found = errors(logits, targets, fused=True, **options)
    values = GRADIENT_BOUND[torch.float64] if logits.dtype == torch.float64 else FLOAT32
    assert found.log_prob <= values
    assert found.entropy <= values
    assert found.gradient <= GRADIENT_BOUND[logits.dtype]


@needs_compiler
def test_float32_of_every_shape_and_temperature() -> None:
    for rows, columns in ((T, V), (1, V), (5, 32), (7, 4096), (2, 151936)):
        for temperature in (1.0, 0.3, 1.7):
            check(random_logits(rows, columns), torch.arange(rows) % columns, temperature=temperature)


@needs_compiler
@pytest.mark.parametrize("logits", EXTREMES.values(), ids=EXTREMES)
def test_extreme_logits(logits: Tensor) -> None:
    for temperature in (1.0, 0.5):
        check(logits, torch.tensor([7, 7, IGNORE, 7]), temperature=temperature)


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        (torch.float16, {"entropy_grad": False}),
        (torch.float64, {"inplace_backward": True}),
        (torch.float32, {"inplace_backward": True, "rows": slice(2, 11)}),
        (torch.float32, {"inplace_backward": True, "rows": torch.tensor([7, 3, 12, 0])}),
        (torch.float32, {"rows": torch.tensor([7, 3, 12, 0]), "keep_mask": KEEP[:4]}),
    ],
)
def test_other_kernels(dtype: torch.dtype, options: dict[str, Any]) -> None:
    logits = random_logits(dtype=dtype)
    targets = torch.arange(T)[options.get("rows", slice(None))] * 77 % V
    targets[1] = IGNORE
    check(logits, targets, temperature=0.7, **options)


@needs_compiler
def test_no_rows_at_all() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    check(torch.zeros(0, V), nothing)
    check(random_logits(), nothing, rows=nothing)


@needs_compiler
def test_an_ignored_row_may_hold_anything() -> None:
    logits = random_logits().requires_grad_()
    with torch.no_grad():
        logits[4], logits[5], logits[6] = float("nan"), float("inf"), -float("inf")
    targets = random_targets()
    targets[4:7] = IGNORE
    found = vocab_parallel_log_probs_and_entropy(logits, targets, fused=True)
    sum(values.sum() for values in found).backward()
    assert logits.grad is not None
    for values in (*found, logits.grad):
        assert values.isfinite().all()
        assert (values[4:7] == 0).all()


def test_auto_takes_kernels_for_large_logits_only() -> None:
    small, large = torch.zeros(8, 1024), torch.zeros(1, 1).expand(8192, 4096)
    with mock.patch.object(_fused, "statistics", side_effect=RuntimeError("chosen")) as chosen:
        vocab_parallel_log_probs(small, torch.zeros(8, dtype=torch.int64))
        chosen.assert_not_called()
        with pytest.raises(RuntimeError, match="chosen"):
            vocab_parallel_log_probs(large, torch.zeros(8192, dtype=torch.int64))


@pytest.mark.usefixtures("forget_kernels")
def test_without_a_compiler_auto_goes_on_silently() -> None:
    """And does not ask again; ``fused=True`` says why not."""
    logits, targets = random_logits(), random_targets()
    failing = mock.Mock(side_effect=RuntimeError("no C++ compiler"))
    with (
        mock.patch.object(torch, "compile", return_value=failing) as compiling,
        mock.patch.object(_fused, "WORTHWHILE_ELEMENTS", 0),
    ):
        for _ in range(3):
            assert errors(logits, targets, fused="auto").gradient <= FLOAT32
        assert compiling.call_count == 2  # forward, backward
        with pytest.raises(InvalidInputError, match="no C\\+\\+ compiler"):
            vocab_parallel_log_probs_and_entropy(logits, targets, fused=True)


@pytest.mark.usefixtures("forget_kernels")
def test_running_out_of_memory_is_not_hidden() -> None:
    failing = mock.Mock(side_effect=torch.OutOfMemoryError("full"))
    with mock.patch.object(torch, "compile", return_value=failing), pytest.raises(torch.OutOfMemoryError):
        vocab_parallel_log_probs(random_logits(), random_targets(), fused=True)


def test_kernels_that_run_as_python_are_refused() -> None:
    with torch.compiler.set_stance("force_eager"), pytest.raises(InvalidInputError, match="switched off"):
        vocab_parallel_log_probs(random_logits(), random_targets(), fused=True)


def test_what_no_kernel_can_do_is_refused_at_once() -> None:
    strided = random_logits().t().contiguous().t()
    with pytest.raises(InvalidInputError, match="not contiguous"):
        vocab_parallel_log_probs(strided, random_targets(), fused=True)
    options = {"rows": torch.tensor([3, 1]), "keep_mask": KEEP[:2]}
    with pytest.raises(InvalidInputError, match="rows must be a slice"):
        vocab_parallel_log_probs(
            random_logits(), random_targets(2), inplace_backward=True, fused=True, **options
        )
