"""When block functions are compiled, what happens when the compiler fails, and how many kernels it makes.

That compiled functions give what plain operators give is in test_table, with the same cases. The count of
kernels, and of how often they read the logits, is what the compiler plans for a GPU, which needs none.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron_rl_patches.losses import (
    deferred_logits,
    full_vocabulary_divergence,
    vocab_parallel_log_probs_and_entropy,
    vocab_parallel_log_probs_at,
)
from megatron_rl_patches.losses.vocab import compiling, full_divergence, topk
from megatron_rl_patches.losses.vocab.divergences import DIVERGENCES
from tests.references.live_bytes import live_bytes
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


def compiles(test: Any) -> Any:
    """Mark a test that compiles: torch itself has warnings of its own when inductor is imported."""
    test = pytest.mark.filterwarnings("ignore::DeprecationWarning")(test)
    return pytest.mark.skipif(not compiling._has_compiler("cpu"), reason="needs a C++ compiler")(test)


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
    def __init__(self) -> None:
        self.calls = 0
        self.fails_from: float = float("inf")
        self.error: Exception = OSError(28, "No space left on device")

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
    calls, compiler.fails_from = compiler.calls, float("inf")
    check_targets(logits, fused="auto", **options)
    assert compiler.calls == calls  # not at once
    monkeypatch.setattr(compiling, "_no_retry_before", 0.0)  # but after some minutes
    check_targets(logits, fused="auto", **options)
    assert compiler.calls > calls


@pytest.mark.parametrize("inplace", [False, True])
def test_where_compiling_fails_memory_is_that_of_plain_operators(
    inplace: bool, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In forward, and in backward alone."""
    leaf, targets = torch.randn(256, 16384, requires_grad=True), torch.randint(16384, (256,))

    def peaks(fused: Any) -> list[int]:
        """Return those of forward and of backward."""
        logits, values = leaf * 1, list[torch.Tensor]()

        def forward() -> None:
            options: dict[str, Any] = {"temperature": 0.7, "inplace_backward": inplace, "fused": fused}
            values.extend(vocab_parallel_log_probs_and_entropy(logits, targets, **options))

        of_forward = live_bytes(forward).peak
        if compiler.fails_from:
            compiler.fails_from = compiler.calls
        total = sum(value.sum() for value in values)
        return [of_forward, live_bytes(lambda: torch.autograd.grad(total, logits)).peak]

    plain = peaks(False)
    compiler.fails_from = 0
    assert (peaks("auto"), compiler.calls) == (plain, 1)
    monkeypatch.setattr(compiling, "_no_retry_before", 0.0)
    compiler.fails_from = math.inf
    of_forward, of_backward = peaks("auto")
    assert of_forward != plain[0] and of_backward == plain[1]


@pytest.mark.parametrize("name", ["forward_kl", "jensen_shannon"])
def test_divergences_where_compiling_fails(
    name: Any, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any block of any part of a tile: what is written before is not computed again."""
    student, hidden, weight = (torch.randn(*shape) for shape in ((64, 8192), (64, 8), (8192, 8)))
    student.requires_grad_()
    in_two_blocks = full_divergence._BLOCKS._replace(compiled=2)
    monkeypatch.setattr(full_divergence, "_BLOCKS", in_two_blocks)

    def step() -> tuple[int, list[torch.Tensor]]:
        logits, results = student * 1, list[torch.Tensor]()

        def forward() -> None:
            teacher = deferred_logits(hidden, weight, tile_bytes=1 << 20)  # two parts
            results.append(
                full_vocabulary_divergence(logits, teacher, divergence=name, inplace_backward=True)
            )

        peak = live_bytes(forward).peak
        return peak, [*results, *torch.autograd.grad(results[0].sum(), logits)]

    with monkeypatch.context() as context:
        context.setattr(compiling, "WORTHWHILE_ELEMENTS", math.inf)
        plain, expected = step()
    step()
    for fails_from in range(compiler.calls):
        compiler.calls, compiler.fails_from = 0, fails_from
        monkeypatch.setattr(compiling, "_no_retry_before", 0.0)
        peak, results = step()
        assert compiler.calls == fails_from + 1
        assert fails_from or peak <= plain + 64  # bytes of numbers that a compiled function gets
        torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-9)


def _variable(name: str) -> Any:
    return mock.patch.dict(os.environ, {name: "1"})


DISABLED: dict[str, Callable[[], Any]] = {
    # As slime does for runs whose training and inference have to agree.
    "TORCH_COMPILE_DISABLE": partial(_variable, "TORCH_COMPILE_DISABLE"),
    "TORCHDYNAMO_DISABLE": partial(_variable, "TORCHDYNAMO_DISABLE"),
    "option": lambda: torch._dynamo.config.patch(disable=True),
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


some_rows = pytest.mark.parametrize(
    "rows", [None, slice(2, 9), torch.tensor([8, 1, 5, 2, 11, 3, 0]), [slice(0, 1), slice(4, 11)]], ids=str
)


@some_rows
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


@compiles
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


ROWS, COLUMNS = 6, 1024


class Plan(NamedTuple):
    kernels: int
    reads: int  # of all rows and columns of a tensor, by all kernels together
    arguments: int  # how many of these are arguments of the function: read once, and not written before


class Planned(Exception):
    """Ends compiling."""


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Plan]]:
    """The plans for the functions that are called; any logits count as large."""
    import torch._inductor.config as config
    from torch._inductor import ir
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V as current

    of_functions: dict[str, Plan] = {}
    functions: list[str] = []
    call_compiled = compiling._call_compiled

    def call(function: Any, *args: Any) -> Any:
        functions.append(function.__name__)
        return call_compiled(function, *args)

    def reads_all(access: Any) -> bool:  # of a block, which is a part of all rows
        sizes = current.graph.sizevars
        hint = sizes.size_hint if hasattr(sizes, "size_hint") else sizes.optimization_hint
        if not hasattr(access, "ranges"):
            return hint(access.get_numel()) >= COLUMNS
        # Of a read by index, get_numel() is the size of the whole tensor.
        used = access.index.free_symbols
        return math.prod(hint(size) for name, size in access.ranges.items() if name in used) >= COLUMNS

    def plan(scheduler: Any) -> None:
        nodes = [node for node in scheduler.nodes if type(node).__name__ != "NopKernelSchedulerNode"]
        read = []
        for node in nodes:
            reads, writes = node.read_writes.reads, node.read_writes.writes
            names = {access.name for access in reads if reads_all(access)}
            read += names - {access.name for access in writes}
        arguments = set(read).intersection(current.graph.graph_input_names)
        of_functions[functions[-1]] = Plan(len(nodes), len(read), len(arguments))
        raise Planned

    def give_up(call: Any, error: Exception) -> None:
        assert "Planned" in str(error)
        call.compiled = False

    monkeypatch.setattr(compiling, "WORTHWHILE_ELEMENTS", 0)
    monkeypatch.setattr(compiling, "_call_compiled", call)
    monkeypatch.setattr(compiling.BlockFunction, "_give_up", give_up)
    monkeypatch.setattr(Scheduler, "codegen", plan)
    monkeypatch.setattr(ir, "is_cpu", lambda data: False)  # for a CPU it stores exponentials
    torch._dynamo.reset()
    with config.patch(fx_graph_cache=False, cpu_backend="triton"):
        yield of_functions
    torch._dynamo.reset()


def random(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, COLUMNS).to(dtype).requires_grad_()


@compiles
@pytest.mark.nightly
def test_log_probs_at_ids_read_logits_once(plans: dict[str, Plan]) -> None:
    values = vocab_parallel_log_probs_at(random(), torch.arange(ROWS)[:, None], with_tail=True)
    sum(value.sum() for value in values).backward()
    assert plans["block_statistics"][1:] == (2, 2)  # logits, and the mask of the tail
    assert plans["block_gradient"] == Plan(1, 2, 2)  # logits, and what is overwritten


@compiles
@pytest.mark.parametrize("inplace", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("has_mask", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_log_probs_and_entropy(plans: dict[str, Plan], inplace: bool, has_mask: bool) -> None:
    """Two softmaxes, of the columns in a mask and of all, are computed at once."""
    logits = random(torch.bfloat16 if inplace else torch.float32) * 1
    options: dict[str, Any] = {"inplace_backward": inplace, "temperature": 1.0 if inplace else 0.7}
    mask = torch.rand(ROWS, COLUMNS) < 0.5 if has_mask else None
    values = vocab_parallel_log_probs_and_entropy(
        logits, torch.arange(ROWS), keep_mask=mask, entropy_grad=not (inplace and has_mask), **options
    )
    sum(value.sum() for value in values).backward()
    # One kernel reads the logits. The other ones put stretches together, for each softmax.
    of_statistics = plans["block_statistics"]
    assert of_statistics.kernels <= 4 + 2 * has_mask
    assert of_statistics[1:] == (1 + has_mask, 1 + has_mask)
    # What is written in place of the logits is no argument of its own.
    expected = 1 + has_mask + (not inplace)
    assert plans["block_gradient"] == Plan(1, expected, expected)


COMPARED = [(name, 1) for name, divergence in DIVERGENCES.items() if divergence.counts_tail]


@compiles
@pytest.mark.parametrize(
    ("name", "teachers"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case == ("forward_kl", 2) else pytest.mark.nightly)
        for case in (*COMPARED, ("forward_kl", 2))
    ],
)
def test_divergences(plans: dict[str, Plan], name: Any, teachers: int) -> None:
    options: dict[str, Any] = {"divergence": name, "temperature": 0.7, "old": random().detach()}
    of_teachers = [random().detach() for _ in range(teachers)]
    full_vocabulary_divergence(random(), of_teachers, **options).sum().backward()
    read = 1 + teachers + DIVERGENCES[name].needs_old
    assert plans.pop("_block_derivative") == Plan(1, read + 1, read + 1)
    expected = {"_conditional_parts": Plan(2, read, read)}
    if teachers > 1 or DIVERGENCES[name].needs_normalizers:
        # One kernel reads all logits. The other ones put stretches together, for each of the distributions.
        expected = {"_normalizers": Plan(1 + read, read, read), "_sums": Plan(2, read, read)}
    assert plans == expected
