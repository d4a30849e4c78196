"""How many kernels the compiler makes of the functions of a block, and how often they read the logits.

This counts what the compiler plans for a GPU, which needs none: only code that it would write next needs one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.losses import full_vocabulary_divergence, vocab_parallel_log_probs_and_entropy
from megatron_rl_patches.losses.logits import compiling
from megatron_rl_patches.losses.logits.divergences import DIVERGENCES

pytestmark = [
    pytest.mark.skipif(not compiling._has_compiler("cpu"), reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch itself, when inductor is imported
]
ROWS, V = 6, 1024


class Plan(NamedTuple):
    """Of one function.

    Attributes:
        kernels: how many there are.
        reads: how many tensors with all rows and columns they read, together.
        arguments: how many of these the function has as arguments: what is read once, and was not written.
    """

    kernels: int
    reads: int
    arguments: int


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

    def is_logits(name: str) -> bool:
        sizes = current.graph.sizevars
        hint = sizes.size_hint if hasattr(sizes, "size_hint") else sizes.optimization_hint
        return math.prod(map(hint, current.graph.get_buffer(name).get_size())) >= ROWS * V

    def plan(scheduler: Any) -> None:
        nodes = [node for node in scheduler.nodes if type(node).__name__ != "NopKernelSchedulerNode"]
        read = []
        for node in nodes:
            reads, writes = node.read_writes.reads, node.read_writes.writes
            names = {access.name for access in reads} - {access.name for access in writes}
            read += filter(is_logits, names)
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
    return torch.randn(ROWS, V).to(dtype).requires_grad_()


@pytest.mark.parametrize(
    ("dtype", "inplace", "has_mask", "entropy_grad", "temperature"),
    [
        (torch.float32, False, False, True, 0.7),
        pytest.param(torch.bfloat16, False, False, True, 1.0, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, True, False, True, 0.7, marks=pytest.mark.slow),
        pytest.param(torch.float32, False, True, True, 0.7, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, True, True, False, 1.0, marks=pytest.mark.slow),
    ],
)
def test_log_probs_and_entropy(
    plans: dict[str, Plan],
    dtype: torch.dtype,
    inplace: bool,
    has_mask: bool,
    entropy_grad: bool,
    temperature: float,
) -> None:
    """Two softmaxes, of the columns in a mask and of all, are computed at once."""
    mask = torch.rand(ROWS, V) < 0.5 if has_mask else None
    options: dict[str, Any] = {"temperature": temperature, "inplace_backward": inplace, "keep_mask": mask}
    values = vocab_parallel_log_probs_and_entropy(
        random(dtype) * 1, torch.arange(ROWS), entropy_grad=entropy_grad, **options
    )
    sum(value.sum() for value in values).backward()
    # One kernel reads the logits. The other ones put stretches together, for each softmax.
    assert plans["block_statistics"] == Plan(2 + has_mask, 1 + has_mask, 1 + has_mask)
    # What is written in place of the logits is no argument of its own.
    expected = 1 + has_mask + (not inplace)
    assert plans["block_gradient"] == Plan(1, expected, expected)


@pytest.mark.parametrize("teachers", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        name if name == "forward_kl" else pytest.param(name, marks=pytest.mark.slow)
        for name, divergence in DIVERGENCES.items()
        if divergence.counts_tail
    ],
)
def test_divergences(plans: dict[str, Plan], name: Any, teachers: int) -> None:
    options: dict[str, Any] = {"divergence": name, "temperature": 0.7, "old": random().detach()}
    of_teachers = [random().detach() for _ in range(teachers)]
    full_vocabulary_divergence(random(), of_teachers, num_ids=V - 3, **options).sum().backward()
    read = 1 + teachers + DIVERGENCES[name].needs_old
    assert plans.pop("_block_derivative") == Plan(1, read + 1, read + 1)
    functions = ["_conditional_parts"]
    if teachers > 1 or DIVERGENCES[name].needs_normalizers:
        functions = ["_normalizers", "_sums"]
    assert plans == dict.fromkeys(functions, Plan(2, read, read))
