"""What the compiler's Triton kernels compute, in triton's interpreter on a CPU.

``python -m tests.lab.kernels.interpreted CASE`` reads from standard input the sources that
:mod:`.machine_code` printed for a case. It computes a loss and its gradient on few rows in host memory, with
these in place of compiled functions. Each of them must load each logit once, and its results are compared
with those of the function in float64. The largest error of each is printed as JSON. ``TRITON_INTERPRET`` is
set before triton is imported, since triton reads it then.
"""

import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
from torch import Tensor
from torch._inductor.runtime import triton_helpers
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten
from triton.runtime import interpreter

from megatron_rl_patches import losses
from megatron_rl_patches.losses.vocab import compiling, reduction
from megatron_rl_patches.losses.vocab.softmax import block_gradient, block_statistics
from tests.lab.kernels.machine_code import load
from tests.lab.kernels.sources import CAPABILITY, Source, pretended_gpu, scores, sizes_of, tensors_of
from tests.lab.rehearsal.recorder import raise_at_once
from tests.references.losses import error

STRETCHES = 3
#: Standard deviations of logits. Beyond these, errors grow with the distance from a row's largest logit.
SPREADS = torch.tensor([2.0, 10.0, 1.0, 1.0, 10.0])
ROWS = len(SPREADS)


class _Libdevice:
    """Functions of CUDA's library, which the interpreter lacks, by those of numpy."""

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        def apply(x: Any) -> Any:
            data = getattr(np, name)(x.handle.data).astype(x.handle.data.dtype)
            return triton.language.core.tensor(interpreter.TensorHandle(data, x.handle.dtype), x.type)

        return apply


def _max(x: Any, dimension: int) -> Any:
    """Return the maximum as ``triton_helpers.max2`` does, with NaN, which takes the interpreter a minute."""
    data = x.handle.data.max(dimension)
    handle = interpreter.TensorHandle(data, x.handle.dtype)
    return triton.language.core.tensor(
        handle, triton.language.core.block_type(x.type.scalar, list(data.shape))
    )


@contextmanager
def counted_loads(x: Tensor) -> Iterator[Any]:
    """Count how often each element of a tensor is loaded."""
    counts, start, size = np.zeros(x.numel(), dtype=np.int64), x.data_ptr(), x.element_size()
    load_masked = interpreter.InterpreterBuilder.create_masked_load

    def counting(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        addresses = pointers.data[np.broadcast_to(mask.data.astype(bool), pointers.data.shape)]
        places = (addresses.astype(np.int64) - start) // size
        np.add.at(counts, places[(places >= 0) & (places < len(counts))], 1)
        return load_masked(self, pointers, mask, *others)

    with patch.object(interpreter.InterpreterBuilder, "create_masked_load", counting):
        yield counts


class _Kernel:
    """Runs one program after the other; stands in for what the compiler's loader returns."""

    def __init__(self, name: str, source: str, folder: Path) -> None:
        with pretended_gpu(CAPABILITY):
            self._kernel = load(name, source, folder, CAPABILITY)

    def run(self, *args: Any, stream: object = None) -> None:
        blocks = dict(self._kernel.configs[0].kwargs)
        names = [name for name in self._kernel.triton_meta["signature"] if name not in blocks]
        sizes = dict(zip(names, args, strict=True))
        grid = [triton.cdiv(sizes.get(f"{d}numel", 1), blocks.get(f"{d.upper()}BLOCK", 1)) for d in "xy"]
        if "R0_BLOCK" in blocks:  # the interpreter takes long for masked elements, too
            blocks["R0_BLOCK"] = min(blocks["R0_BLOCK"], triton.next_power_of_2(sizes["r0_numel"]))
        self._kernel.fn[(*grid, 1)](*args, **blocks)


def run(code: str, inputs: Sequence[Any]) -> Any:
    """Run generated code on tensors in host memory; new tensors are full of NaN."""

    def new(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        made = torch.empty_strided(size, stride, dtype=dtype)
        return made.fill_(float("nan")) if dtype.is_floating_point else made

    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(triton_helpers, "libdevice", _Libdevice()),
        patch.object(triton_helpers, "max2", _max),
    ):
        replaced = SimpleNamespace(
            triton=lambda name, source, device_str: _Kernel(name, source, Path(folder)),
            wait=lambda scope: None,
            guard=nullcontext,
            new=new,
            stream=lambda index: 0,
        )
        for pattern, replacement in (
            (r"^async_compile = AsyncCompile\(\)", "async_compile = REPLACED"),
            (
                r"^from torch\._C import _cuda_getCurrentRawStream as get_raw_stream",
                "get_raw_stream = REPLACED.stream",
            ),
            (r"^empty_strided_cuda = .*", "empty_strided_cuda = REPLACED.new"),
            (r"torch\.cuda\._DeviceGuard\(0\)", "REPLACED.guard()"),
            (r"torch\.cuda\.set_device\(0\)", "pass"),
        ):
            code = re.sub(pattern, replacement, code, flags=re.M)
        scope: dict[str, Any] = {"REPLACED": replaced}
        exec(compile(code, "generated", "exec"), scope)
        with np.errstate(all="ignore"):
            return scope["call"](list(inputs))


def logits_of(args: Sequence[Any]) -> list[Tensor]:
    return args[0] if isinstance(args[0], list) else [args[0]]


def in_float64(args: Sequence[Any]) -> Any:
    """Return copies of arguments; a tensor that comes twice is one tensor."""
    memo: dict[int, Tensor] = {}

    def convert(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point():
            return memo.setdefault(id(x), x.double().clone())
        return torch.float64 if x is torch.float32 else x

    return tree_map(convert, args)


def interpreting(sources: dict[str, Source], errors: dict[str, float]) -> Callable[..., Any]:
    """Return what runs in place of compiled functions, and notes the largest error of each."""

    def compiled(function: Callable[..., Any], is_elementwise: bool) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            exact_args = in_float64(args)
            exact = function(*exact_args)
            (code, places), tensors = sources[function.__name__], tensors_of(args)
            inputs = [sizes_of(tensors[i])[d[0]] if d else tensors[i] for i, *d in places]
            with ExitStack() as stack:
                loads = [stack.enter_context(counted_loads(x)) for x in logits_of(args)]
                outputs = run(code, inputs)
            check_loads(loads, args, is_elementwise)
            result = None if exact is None else tree_unflatten(outputs, tree_structure(exact))
            if is_elementwise:  # it has overwritten an argument; errors are relative to the largest of a row
                place = 1 if function is block_gradient else -1
                scale = exact_args[place].nan_to_num().abs().amax((1, 2), keepdim=True).clamp(min=1e-300)
                of_function = [error(args[place], exact_args[place], scale)]
            else:
                # Divergences may be next to zero; their errors are compared with 1 then.
                least = 1e-300 if function is block_statistics else 1.0
                pairs = zip(tree_leaves(result), tree_leaves(exact), strict=True)
                of_function = [error(computed, x, x.abs().clamp(min=least)) for computed, x in pairs]
            errors[function.__name__] = max(*of_function, errors.get(function.__name__, 0.0))
            return result

        return call

    return compiled


def check_loads(loads: Sequence[Any], args: Sequence[Any], is_elementwise: bool) -> None:
    """Each logit is loaded once. Statistics load the stretch of a row's largest logit once more."""
    more = sum(int((counts - 1).sum()) for counts in loads)
    is_statistics = not is_elementwise and len(loads) == 1
    passes = len(args[1]) if is_statistics else 0
    rows, _, columns = logits_of(args)[0].shape
    assert min(counts.min() for counts in loads) == 1 and more == passes * rows * columns, loads


# --- cases of :mod:`.sources`, on few rows


def logits(width: int) -> Tensor:
    """Return rows of which one has -inf, one -inf alone, and one NaN.

    They are in float32 for kernels that read bfloat16, too: the interpreter cuts off what a GPU rounds.
    """
    x = SPREADS[:, None] * torch.randn(ROWS, width)
    x[1, width // 2] = x[2] = float("-inf")
    x[3, 7] = float("nan")
    return x.requires_grad_()


def backward(*values: Tensor) -> None:
    weights = torch.randn(len(values), ROWS)
    weights[:, 3] = 0.0  # of the row with NaN, whose gradient is zero then
    (torch.stack(values) * weights).sum().backward()


def log_probs(stretch: int, entropy: bool = True, mask: bool = False, **options: Any) -> None:
    x = logits(stretch * STRETCHES) * 1
    keep_mask = torch.rand(x.shape) < 0.5 if mask else None
    backward(*scores(x, torch.arange(ROWS), entropy, keep_mask=keep_mask, **options))


def at_ids() -> None:
    x = logits(1024 * STRETCHES)
    ids = torch.randint(x.shape[1], (ROWS, 5))
    ids[0, 1], ids[1, 0] = ids[0, 0], x.shape[1] // 2  # one twice, and one whose logit is -inf
    values = losses.vocab_parallel_log_probs_at(x * 1, ids, with_tail=True)
    backward(*(value.view(ROWS, -1).sum(1) for value in values))


def divergence(name: Any) -> None:
    student = logits(1024 * STRETCHES)
    teacher = student.detach() + torch.randn(student.shape)
    options: dict[str, Any] = {"divergence": name, "inplace_backward": True}
    backward(losses.full_vocabulary_divergence(student * 1, teacher, **options))


CASES: dict[str, Callable[[], None]] = {
    "head": partial(log_probs, 1024, inplace_backward=True),
    "head, log-probs": partial(log_probs, 1024, entropy=False, inplace_backward=True),
    "ids": at_ids,
    "materialized, float32": partial(log_probs, 128),
    "materialized, float32, keep-mask": partial(log_probs, 128, mask=True),
    **{name: partial(divergence, name=name) for name in ("reverse_kl", "forward_kl", "jensen_shannon")},
}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    sources, errors = json.load(sys.stdin), dict[str, float]()
    with ExitStack() as stack:
        for owner, name, value in (
            (compiling, "WORTHWHILE_ELEMENTS", 0),
            (compiling, "_has_compiler", lambda device: True),
            (compiling, "_compiled", interpreting(sources, errors)),
            (compiling.BlockFunction, "_give_up", raise_at_once),
            # As on a GPU:
            (reduction, "_as_one_stretch", reduction.stretches),
            (reduction, "_compiled_rows", lambda tile, *others: tile.rows.stop - tile.rows.start),
        ):
            stack.enter_context(patch.object(owner, name, value))
        CASES[sys.argv[1]]()
    assert errors.keys() == sources.keys()
    print(json.dumps(errors))
