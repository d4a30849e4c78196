"""What the compiler's Triton kernels compute, in triton's interpreter on a CPU.

``python -m tests.lab.kernels.interpreted`` runs the code that the compiler generates for a GPU on tensors in
host memory, compares the results with float64, counts how often each logit is loaded, and prints the largest
relative errors as JSON. ``TRITON_INTERPRET`` is set before triton is imported, since triton reads it then.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from triton.runtime import interpreter

from megatron_rl_patches.losses.logits import compiling, softmax
from tests.lab.kernels.machine_code import load
from tests.lab.kernels.pretended_gpu import pretended_gpu
from tests.lab.kernels.sources import CAPABILITY, generate

ROWS, WIDTH = 5, 1024
TEMPERATURE = 0.8
#: Standard deviations of logits. Beyond these, errors grow with the distance from a row's largest logit.
SPREADS = (2.0, 10.0)
#: The code of each function, by the types of what it gets.
_codes: dict[tuple[Any, ...], str] = {}


class _Libdevice:
    """Functions of CUDA's library, which the interpreter lacks, by those of numpy."""

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        def apply(x: Any) -> Any:
            data = getattr(np, name)(x.handle.data).astype(x.handle.data.dtype)
            return triton.language.core.tensor(interpreter.TensorHandle(data, x.handle.dtype), x.type)

        return apply


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
        blocks = self._kernel.configs[0].kwargs
        names = [name for name in self._kernel.triton_meta["signature"] if name not in blocks]
        sizes = dict(zip(names, args, strict=True))
        grid = [triton.cdiv(sizes.get(f"{d}numel", 1), blocks.get(f"{d.upper()}BLOCK", 1)) for d in "xy"]
        self._kernel.fn[(*grid, 1)](*args, **blocks)


def run(code: str, inputs: Sequence[Any]) -> Any:
    """Run generated code on tensors in host memory; new tensors are full of NaN."""

    def new(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        made = torch.empty_strided(size, stride, dtype=dtype)
        return made.fill_(float("nan")) if dtype.is_floating_point else made

    with tempfile.TemporaryDirectory() as folder, patch.object(triton_helpers, "libdevice", _Libdevice()):
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


def code_of(function: Callable[..., Any], is_elementwise: bool, *args: Any) -> str:
    """Return what the compiler generates for a GPU and these arguments, whose logits are the first one."""
    key = function, str(tree_map(lambda x: x.dtype if isinstance(x, Tensor) else x, args))
    if key in _codes:
        return _codes[key]
    memo: dict[int, Tensor] = {}  # a tensor that comes twice is one tensor

    def fake(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return memo.setdefault(id(x), torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda"))

    with pretended_gpu(CAPABILITY), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        compiled = partial(compiling._call_compiled, function, is_elementwise)
        _codes[key] = generate(compiled, *tree_map(fake, args))
    return _codes[key]


def inputs_of(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what the compiled code takes for these arguments, in its order."""
    taken: list[Any] = []

    def backend(graph: Any, examples: object) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            taken.extend(inputs)
            return graph.forward(*[x.clone() if isinstance(x, Tensor) else x for x in inputs])

        return call

    torch._dynamo.reset()
    torch._dynamo.mark_static(args[0], 2)
    with torch.no_grad():
        torch.compile(function, dynamic=True, fullgraph=True, backend=backend)(*args)
    return taken


def logits_of(dtype: torch.dtype, spread: float) -> Tensor:
    """Return rows in stretches: one with -inf, one of -inf alone, one with NaN."""
    x = (spread * torch.randn(ROWS, 4, WIDTH // 4)).to(dtype)
    x[1, 2, 3] = x[2] = float("-inf")
    x[3, 0, 7] = float("nan")
    return x


def error_of_statistics(dtype: torch.dtype, spread: float, entropy: bool) -> float:
    x, temperature, passes = logits_of(dtype, spread), torch.tensor(TEMPERATURE), [(None, entropy)]
    function = softmax.block_statistics
    code = code_of(function, False, x, passes, temperature)
    with counted_loads(x) as loads:
        statistics = run(code, inputs_of(function, x, passes, temperature))
    # The stretch of the largest logit is read once more.
    assert loads.min() == 1 and loads.max() == 2 and (loads == 2).sum() == ROWS * WIDTH // 4, loads
    worst = 0.0
    (expected,) = function(x.double(), passes, temperature.double())
    for value, exact in zip(statistics, expected, strict=True):
        assert torch.equal(value.isnan(), exact.isnan()), (value, exact)
        assert torch.equal(value.isinf(), exact.isinf()), (value, exact)
        is_finite = exact.isfinite()
        errors = (value[is_finite] - exact[is_finite]).abs() / exact[is_finite].abs().clamp(min=1e-300)
        worst = max(worst, errors.max().item())
    return worst


def error_of_gradient(dtype: torch.dtype, spread: float, entropy: bool) -> float:
    """Return the largest error, in units of the largest entry of a row; the gradient replaces the logits."""
    x = logits_of(dtype, spread)
    has_grad = torch.tensor([True, True, True, False, True])[:, None, None]
    reference = softmax.finite(x.float().nan_to_num(0.0, neginf=-torch.inf).amax((1, 2), keepdim=True))
    a, b = torch.randn(ROWS, 1, 1), torch.randn(ROWS, 1, 1) if entropy else None
    scale, function = torch.tensor(TEMPERATURE), softmax.block_gradient

    def arguments(x: Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
        of_rows = tuple(None if value is None else value.to(dtype) for value in (reference, a, b))
        return x, x, of_rows, softmax.NO_SOFTMAX, None, has_grad, scale.to(dtype), None

    exact = x.double()
    function(*arguments(exact, torch.float64))
    args = arguments(x, torch.float32)
    code, inputs = code_of(function, True, *args), inputs_of(function, *args)
    with counted_loads(x) as loads:
        run(code, inputs)
    assert loads.min() == loads.max() == 1, loads
    assert x[3].eq(0).all() and exact[3].eq(0).all()
    largest = exact.abs().amax((1, 2), keepdim=True).clamp(min=1e-300)
    return ((x.double() - exact).abs() / largest).max().item()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.compile_threads = 1
    torch.manual_seed(0)
    errors: dict[str, dict[str, float]] = {}
    for kind, error in {"statistics": error_of_statistics, "gradient": error_of_gradient}.items():
        for dtype in (torch.float32, torch.bfloat16):
            of_all = [error(dtype, spread, entropy) for entropy in (True, False) for spread in SPREADS]
            errors.setdefault(kind, {})[str(dtype).removeprefix("torch.")] = max(of_all)
    print(json.dumps(errors))
