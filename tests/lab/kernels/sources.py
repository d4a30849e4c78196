"""The Triton kernels that torch's compiler makes of the functions of a block, as sources.

Cases of the rehearsal run at real sizes, on fake CUDA tensors, in a process that has the libraries of
:mod:`tests.lab.rehearsal.stand_ins`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch._inductor.config as inductor
from torch import Tensor
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_rl_patches import losses
from megatron_rl_patches.losses.vocab import compiling
from megatron_rl_patches.losses.vocab.divergences import Divergence
from tests.lab.kernels.pretended_gpu import pretended_gpu
from tests.lab.rehearsal.cases import backward, ids, layer
from tests.lab.rehearsal.recorder import recording

#: Others have published numbers for this output layer: [rows, hidden size] and the vocabulary.
ROWS, HIDDEN, VOCABULARY = 8192, 4096, 131_072
GEMMA = 262_144  # the vocabulary of Gemma
QWEN = 151_936  # the vocabulary of Qwen, which is a multiple of 128 and of no larger power of two
#: H100. The sources for other GPUs differ in their number of multiprocessors alone.
CAPABILITY = 90


def head(entropy: bool = True) -> None:
    hidden, weight = layer(torch.bfloat16, HIDDEN, rows=ROWS, vocabulary=VOCABULARY)
    backward(hidden, *_scores(losses.deferred_logits(hidden, weight), entropy))


def materialized(dtype: torch.dtype, mask: bool = False) -> None:
    logits = torch.empty(ROWS // 2, QWEN, device="cuda", dtype=dtype, requires_grad=True)
    keep_mask = torch.empty(logits.shape, device="cuda", dtype=torch.bool) if mask else None
    backward(logits, *_scores(logits, keep_mask=keep_mask))


def _scores(logits: Tensor, entropy: bool = True, **options: Any) -> tuple[Tensor, ...]:
    function = losses.vocab_parallel_log_probs_and_entropy if entropy else losses.vocab_parallel_log_probs
    values = function(logits, ids(len(logits)), temperature=0.8, **options)
    return values if isinstance(values, tuple) else (values,)


def at_ids() -> None:
    # With 131,072 ids, a block would have as many rows as a stretch has columns, and the compiled code would
    # work for no other number of rows.
    logits = torch.empty(ROWS, GEMMA, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    backward(logits, *losses.vocab_parallel_log_probs_at(logits, ids(ROWS, 64), with_tail=True))


def divergence(name: Any) -> None:
    hidden, weight = layer(torch.bfloat16, HIDDEN, rows=ROWS // 2, vocabulary=VOCABULARY)
    teacher = losses.deferred_logits(hidden.detach(), weight.detach())
    student = losses.deferred_logits(hidden, weight)
    backward(hidden, losses.full_vocabulary_divergence(student, teacher, divergence=name))


CASES: dict[str, Callable[[], None]] = {
    "head": head,
    "head, log-probs": partial(head, entropy=False),
    "ids": at_ids,
    "materialized, float32": partial(materialized, torch.float32),
    "materialized, float32, keep-mask": partial(materialized, torch.float32, mask=True),
    "reverse_kl": partial(divergence, "reverse_kl"),
    "forward_kl": partial(divergence, "forward_kl"),
    "jensen_shannon": partial(divergence, "jensen_shannon"),
}


class _Generated(Exception):
    """The code is there; it is not loaded, since that would take a GPU."""


def generate(compiled: Callable[..., Any], *args: Any) -> str:
    """Return the code that the compiler makes of a call with fake tensors."""
    codes: list[str] = []

    def take(graph: GraphLowering) -> None:
        codes.append(graph.codegen()[0].value)
        raise _Generated

    torch._dynamo.reset()
    with patch.object(GraphLowering, "compile_to_module", take):
        try:
            compiled(*args)
        except Exception:
            if not codes:
                raise
    return codes[-1]


class Source(NamedTuple):
    """What the compiler makes of a function."""

    code: str
    #: Of the code, in its order: numbers of the arguments' tensors, or of a tensor and one of its sizes_of().
    inputs: list[list[int]]


def inputs_of(function: Callable[..., Any], args: Sequence[Any]) -> list[list[int]]:
    """Return what the compiler takes for these arguments, see :class:`Source`."""
    tensors, inputs = tensors_of(args), list[list[int]]()

    def place(x: Any) -> list[int]:
        if isinstance(x, Tensor):
            return [next(number for number, tensor in enumerate(tensors) if tensor is x)]
        return next(
            [i, d] for i, tensor in enumerate(tensors) for d, n in enumerate(sizes_of(tensor)) if n == x
        )

    def backend(graph: Any, examples: object) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            inputs.extend([place(value) for value in values])
            return graph.forward(*values)

        return call

    torch._dynamo.reset()
    torch.compile(function, dynamic=True, fullgraph=True, backend=backend)(*args)
    return inputs


def sizes_of(tensor: Tensor) -> list[int]:
    """Return the numbers of a tensor that the compiler may take for an argument."""
    return [*tensor.shape, *tensor.stride(), tensor.storage_offset()]


def tensors_of(args: Any) -> list[Tensor]:
    leaves = tree_leaves(args)
    weights = [x.beta for x in leaves if isinstance(x, Divergence)]
    return [x for x in (*leaves, *weights) if isinstance(x, Tensor)]


def sources_of(case: Callable[[], None]) -> dict[str, Source]:
    """Run a case, and return what the compiler makes of each function, by its name."""
    sources: dict[str, Source] = {}
    compiled = compiling._compiled

    def generating(function: Callable[..., Any], is_elementwise: bool) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if function.__name__ not in sources:
                logits = args[0][0] if isinstance(args[0], list) else args[0]
                with _disable_current_modes(), logits.fake_mode:
                    code = generate(compiled(function, is_elementwise), *args)
                    sources[function.__name__] = Source(code, inputs_of(function, args))
            return function(*args)

        return call

    with recording(), pretended_gpu(CAPABILITY), patch.object(compiling, "_compiled", generating):
        case()
    return sources


def generated_codes(case: Callable[[], None]) -> list[str]:
    """Run a case on a GPU, and return all code that the compiler generates for it."""
    codes: list[str] = []
    torch._dynamo.reset()
    with (
        inductor.patch(force_disable_caches=True),
        patch.object(GraphLowering, "save_output_code", codes.append),
    ):
        case()
    return codes
