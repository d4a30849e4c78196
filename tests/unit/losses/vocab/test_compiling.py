"""When block functions are compiled, and what happens when the compiler fails.

That compiled functions give what plain operators give is in test_table, with the same cases. How often the
kernels for GPUs read the logits is in tests/lab/kernels.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron_rl_patches.losses import deferred_logits, vocab_parallel_log_probs_and_entropy
from megatron_rl_patches.losses.vocab import compiling, topk
from tests.references.live_bytes import live_bytes
from tests.references.losses import FUNCTIONS, Inputs
from tests.unit.losses.test_table import (
    STRANGE,
    STRANGE_USES,
    TABLE,
    V,
    check,
    check_strange,
    check_targets,
    random_logits,
    random_targets,
)
from tests.unit.losses.vocab.pairwise import pairwise


def test_a_compiler_that_is_not_there_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_compiler = compiling.cache(compiling._has_compiler.__wrapped__)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not has_compiler("cpu") and not has_compiler("cpu")
    [line] = caplog.messages
    assert "CXX is 'no-such-compiler', and there is no such program" in line


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """A compiler that returns functions as they are, or fails; any logits count as large."""
    compiler = Compiler()
    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(compiling, "WORTHWHILE_ELEMENTS", 0)
    monkeypatch.setattr(compiling, "_has_compiler", lambda device: True)
    monkeypatch.setattr(compiling, "_no_retry_before", 0.0)
    compiling._functions.clear()
    yield compiler
    compiling._functions.clear()


class Compiler:
    calls = 0
    fails_from: float = math.inf
    error: Exception = OSError(28, "No space left on device")

    def __call__(self, function: Any, **options: Any) -> Any:
        def compiled(*args: Any) -> Any:
            self.calls += 1
            if self.calls > self.fails_from:
                raise type(self.error)(*self.error.args)  # a new one, which holds no former traceback
            return function(*args)

        return compiled


@pytest.mark.parametrize("inplace", [False, True])
def test_a_compiler_that_fails_costs_one_warning(
    compiler: Compiler, inplace: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the second block of backward, when the first was overwritten already; the result is right."""
    logits = random_logits()
    options = {"inplace_backward": inplace, "block_bytes": 4 * logits.shape[1] * 4}
    compiler.fails_from = 5  # four blocks of forward, one of backward
    with caplog.at_level(logging.WARNING):
        check_targets(logits, fused="auto", **options)
    [message] = caplog.messages
    assert message.partition(". ")[0] == (
        "megatron_rl_patches: torch.compile failed for block_gradient: "
        "OSError: [Errno 28] No space left on device"
    )
    calls, compiler.fails_from = compiler.calls, math.inf
    check_targets(logits, fused="auto", **options)
    assert compiler.calls == calls  # not at once
    monkeypatch.setattr(compiling, "_no_retry_before", 0.0)  # but after some minutes
    check_targets(logits, fused="auto", **options)
    assert compiler.calls > calls


@pytest.mark.parametrize("name", ["entropy", "forward_kl", "jensen_shannon"])
def test_where_compiling_fails(name: str, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """At some block of any part of a tile, what is written before is not computed again.

    At the first one, memory is that of plain operators, in forward and in backward.
    """
    student, hidden, weight = (torch.randn(*shape) for shape in ((128, 8192), (128, 8), (8192, 8)))
    student.requires_grad_()
    targets, options = torch.arange(128), {"inplace_backward": True}

    def step() -> tuple[list[int], list[Tensor]]:
        logits, results = student * 1, list[Tensor]()

        def forward() -> None:
            teacher = deferred_logits(hidden, weight, tile_bytes=1 << 21)  # two parts
            inputs = Inputs(targets, targets[:, None], teachers=(teacher,))
            results.extend(FUNCTIONS[name].call(logits, inputs, options))

        def backward() -> None:
            results.extend(torch.autograd.grad(sum(x.sum() for x in results), logits))

        return [live_bytes(forward).peak, live_bytes(backward).peak], results

    with monkeypatch.context() as context:
        context.setattr(compiling, "WORTHWHILE_ELEMENTS", math.inf)
        plain, expected = step()
    step()
    calls = compiler.calls
    for fails_from in (0, 1, calls // 3, calls // 2, calls - 1):
        compiler.calls, compiler.fails_from = 0, fails_from
        monkeypatch.setattr(compiling, "_no_retry_before", 0.0)
        peaks, results = step()
        assert compiler.calls == fails_from + 1
        # Bytes of numbers that a compiled function gets.
        assert fails_from or all(x <= most + 64 for x, most in zip(peaks, plain, strict=True))
        torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-9)


DISABLED: dict[str, Callable[[], Any]] = {
    # As slime does for runs whose training and inference have to agree.
    "TORCH_COMPILE_DISABLE": partial(mock.patch.dict, os.environ, TORCH_COMPILE_DISABLE="1"),
    "TORCHDYNAMO_DISABLE": partial(mock.patch.dict, os.environ, TORCHDYNAMO_DISABLE="1"),
    "option": lambda: torch._dynamo.config.patch(disable=True),
    "stance": lambda: torch.compiler.set_stance("force_eager"),
    "mode": partial(FlopCounterMode, display=False),
}


@pytest.mark.parametrize("fused", [True, "auto"])
@pytest.mark.parametrize("how", DISABLED)
def test_nothing_is_compiled_while_torch_does_not_compile(
    how: str, fused: Any, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    with DISABLED[how]():
        check_targets(random_logits(), fused=fused)
    assert compiler.calls == 0
    assert not caplog.records
    check_targets(random_logits(), fused=fused)
    assert compiler.calls > 0


@pytest.mark.parametrize(
    ("fused", "error"), [(True, OSError("full")), ("auto", torch.OutOfMemoryError("full"))]
)
def test_errors_that_are_not_hidden(compiler: Compiler, fused: bool | str, error: Exception) -> None:
    compiler.fails_from, compiler.error = 0, error
    with pytest.raises(type(error), match="full"):
        vocab_parallel_log_probs_and_entropy(random_logits(), random_targets(), fused=fused)


@pytest.mark.parametrize(
    "rows", [None, slice(2, 9), torch.tensor([8, 1, 5, 2, 11, 3, 0]), [slice(0, 1), slice(4, 11)]], ids=str
)
@pytest.mark.parametrize("name", ["entropy", "at ids", "top-k", "forward_kl", "jensen_shannon"])
@pytest.mark.parametrize("source", ["existing", "overwritten", "deferred"])
def test_functions_that_would_be_compiled(
    name: str, source: str, rows: Any, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of four rows. On a GPU the top-k is compiled, too."""
    monkeypatch.setattr(topk, "_COMPILED_ON", {"cpu"})
    case = {**{option: values[0] for option, values in TABLE.items()}, "function": name, "source": source}
    case |= {"rows": rows, "temperature": 0.7, "block_bytes": 4 * V * 4, "kept": name == "entropy"}
    for dtype in (torch.float32, torch.bfloat16):
        calls = compiler.calls
        fused = {"fused": "auto"} if name == "entropy" else {}
        check({**case, "dtype": dtype}, **fused)
        # Two blocks or more, forward and backward.
        assert compiler.calls - calls >= (2 if name == "top-k" else 4)


def test_strange_logits_that_would_be_compiled(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The top-k as on a GPU, of equal logits and all ids, too."""
    monkeypatch.setattr(topk, "_COMPILED_ON", {"cpu"})
    some = {**STRANGE, "source": ["existing", "deferred, frozen"], "width": [2, 33], "block_bytes": [4096]}
    for case, (name, (k, kept)) in product(pairwise(some), STRANGE_USES):
        check_strange(name, case, k, kept)
    assert compiler.calls > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, when inductor is imported
@pytest.mark.skipif(not compiling._has_compiler("cpu"), reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (5, 96),
        *(pytest.param(*shape, marks=pytest.mark.nightly) for shape in ((5, 32), (7, 4096), (2, 151936))),
    ],
)
def test_compiled(rows: int, columns: int) -> None:
    """After a call under a dispatch mode, which must not have ended compiling for this process."""
    with FlopCounterMode(display=False):
        check_targets(random_logits(rows, columns), fused=True, temperature=0.7)
    check_targets(random_logits(rows, columns), fused=True, temperature=0.7)
