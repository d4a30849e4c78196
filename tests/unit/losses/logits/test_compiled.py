"""When block functions are compiled, and what happens when the compiler fails.

That compiled functions give what plain operators give is in test_log_probs, with the same cases.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_rl_patches.losses import vocab_parallel_log_probs_and_entropy
from megatron_rl_patches.losses.logits import compiling

from .test_log_probs import check, random_logits, random_targets


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """A compiler that returns functions as they are, or fails; any logits count as large."""
    compiler = Compiler()
    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(compiling, "WORTHWHILE_ELEMENTS", 0)
    monkeypatch.setattr(compiling, "_has_compiler", lambda device: True)
    monkeypatch.setattr(compiling, "_no_retry_before", 0.0)
    compiling._compiled.cache_clear()
    yield compiler
    compiling._compiled.cache_clear()


class Compiler:
    def __init__(self) -> None:
        self.calls = 0
        self.fails_from: float = float("inf")
        self.error: Exception = OSError(28, "No space left on device")

    def __call__(self, function: Any, **options: Any) -> Any:
        def compiled(*args: Any) -> Any:
            self.calls += 1
            if self.calls > self.fails_from:
                raise self.error
            return function(*args)

        return compiled


@pytest.mark.parametrize("inplace", [False, True])
def test_a_compiler_that_fails_costs_one_warning(
    compiler: Compiler, inplace: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the second block of backward, when the first was overwritten already; the result is right."""
    logits, targets = random_logits(), random_targets()
    options = {"inplace_backward": inplace, "block_bytes": 4 * logits.shape[1] * 4}
    compiler.fails_from = 5  # four blocks of forward, one of backward
    with caplog.at_level(logging.WARNING):
        check(logits, targets, fused="auto", **options)
    assert [record.getMessage() for record in caplog.records] == [
        "torch.compile failed for block_gradient, which goes on with plain operators: "
        "OSError: [Errno 28] No space left on device"
    ]
    calls, compiler.fails_from = compiler.calls, float("inf")
    check(logits, targets, fused="auto", **options)
    assert compiler.calls == calls  # not at once
    monkeypatch.setattr(compiling, "_no_retry_before", 0.0)  # but after some minutes
    check(logits, targets, fused="auto", **options)
    assert compiler.calls > calls


@pytest.mark.parametrize("variable", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_nothing_is_compiled_where_torch_compile_is_disabled(
    variable: str, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As slime does for runs whose training and inference have to agree."""
    monkeypatch.setenv(variable, "1")
    check(random_logits(), random_targets(), fused="auto")
    assert compiler.calls == 0


@pytest.mark.parametrize(
    ("fused", "error"), [(True, OSError("full")), ("auto", torch.OutOfMemoryError("full"))]
)
def test_errors_that_are_not_hidden(compiler: Compiler, fused: bool | str, error: Exception) -> None:
    compiler.fails_from, compiler.error = 0, error
    with pytest.raises(type(error), match="full"):
        vocab_parallel_log_probs_and_entropy(random_logits(), random_targets(), fused=fused)


@pytest.mark.skipif(not compiling._has_compiler("cpu"), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, when inductor is imported
def test_one_compiled_case() -> None:
    check(random_logits(5, 96), torch.arange(5), fused=True, temperature=0.7)


@pytest.mark.slow
@pytest.mark.skipif(not compiling._has_compiler("cpu"), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wide_rows_compiled() -> None:
    for rows, columns in ((5, 32), (7, 4096), (2, 151936), (3, 18992)):
        check(random_logits(rows, columns), torch.arange(rows) % columns, fused=True, temperature=0.7)
