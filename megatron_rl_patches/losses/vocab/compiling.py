"""Block functions, which are compiled for large logits if there is a compiler, and else run eagerly."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch.utils import _python_dispatch

from ...common.messages import Message
from ...common.text import one_line

WORTHWHILE_ELEMENTS = 1 << 24  # the first function is compiled in some ten seconds, others in one or two
RETRY_SECONDS = 300.0
_VARIANTS = 1024  # There are some hundreds of a function: dtypes, with or without temperature, mask, ...
_DISABLING_VARIABLES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")

_NOT_COMPILED = Message(
    "torch.compile failed for {function}: {error}",
    "The result is right, but slower: plain operators compute it.",
    "Ignore it: the package tries again after five minutes. To get the error raised, pass fused=True.",
)
_NO_COMPILER = Message(
    "CXX is {compiler!r}, and there is no such program, so nothing is compiled on the CPU",
    "The result is right, but slower: plain operators compute it.",
    "Unset CXX, or set it to a C++ compiler.",
)
_no_retry_before = 0.0
_functions: dict[Any, Callable[..., Any]] = {}  # by what has compiled them, and from what


class BlockFunction:
    """A function to be called for one block of rows after the other.

    Where compiling is not required and fails, for instance since a disk is full, a warning names the cause,
    ``compiled`` becomes false, and this block and later ones are computed by plain operators, on the smaller
    blocks that these need; some minutes later compiling is tried again. A block can be computed again, since
    the kernel that overwrites its logits is the last compiled one, and nothing is computed after it.
    """

    def __init__(
        self, function: Callable[..., Any], is_required: bool, device: str, is_elementwise: bool
    ) -> None:
        """Take whether the function must be compiled, and whether it writes a value for each logit."""
        self._function, self._required, self._is_elementwise = function, is_required, is_elementwise
        can_compile = is_required or (time.monotonic() >= _no_retry_before and _has_compiler(device))
        self.compiled = can_compile and not _is_disabled()

    def __call__(self, *args: Any) -> Any:
        if self.compiled:
            return _call_compiled(self._function, self._is_elementwise, *args)
        return self._function(*args)

    def each(self, parts: Iterable[tuple[slice, Any]], compute: Callable[..., None], done: int) -> int:
        """Compute parts of rows with the compiled function, until that fails; return where it has ended."""
        with _limits_of_torch():
            for rows, place in parts:
                try:
                    if _compiled(self._function, self._is_elementwise) is self._function:
                        self.compiled = False  # torch.compile is replaced, as in a cpu_backend()
                        break
                    compute(rows, place)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    if self._required:
                        raise
                    self._give_up(error)
                    break
                done = rows.stop
        return done

    def _give_up(self, error: Exception) -> None:
        global _no_retry_before
        self.compiled, _no_retry_before = False, time.monotonic() + RETRY_SECONDS
        # As text, since a record that is stored would hold the tensors of the error.
        _NOT_COMPILED.log(function=self._function.__name__, error=one_line(error))


def _is_disabled() -> bool:
    """Return whether torch would not compile now.

    What it returns then is slower than plain operators on buffers, and takes several times a block's memory.
    Torch 2.13 never compiles a function again that is called meanwhile, or under a dispatch mode; other
    releases raise, or hide from the mode what is compiled.
    """
    in_any_thread = getattr(_python_dispatch, "is_in_any_mode_without_ignore_compile_internals", bool)
    stance = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or in_any_thread()
        or any(os.environ.get(name) == "1" for name in _DISABLING_VARIABLES)
        or getattr(sys.modules.get("torch._dynamo.config"), "disable", False)
        or getattr(stance, "stance", "default") == "force_eager"
    )


@cache
def _has_compiler(device: str) -> bool:
    if device != "cpu":
        return device == "cuda" and importlib.util.find_spec("triton") is not None
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    path = shutil.which(compiler)
    if path is None and "CXX" in os.environ:
        _NO_COMPILER.log(compiler=compiler)
    return path is not None


def _limits_of_torch() -> Any:
    # This import takes a second, so only compiled calls do it.
    import torch._dynamo.config as config

    # torch 2.6 has the limits under their former names.
    names = ("recompile_limit", "accumulated_recompile_limit")
    if not hasattr(config, "recompile_limit"):
        names = ("cache_size_limit", "accumulated_cache_size_limit")
    # Constants of a module become part of the code. Otherwise each call would make tensors of them.
    return config.patch({**dict.fromkeys(names, _VARIANTS), "specialize_float": True})


def _call_compiled(function: Callable[..., Any], is_elementwise: bool, *args: Any) -> Any:
    for rows in args[0] if isinstance(args[0], list) else args[:1]:
        logits = rows[0] if isinstance(rows, tuple) else rows  # perhaps a RowsOf
        # Stretches of a width that is compiled in fit into registers of a GPU, which then reads each once, 16
        # bytes at a time. A single stretch is a whole row, of any width.
        if logits.shape[1] > 1 or not is_elementwise:
            torch._dynamo.mark_static(logits, 2)
    return _compiled(function, is_elementwise)(*args)


#: The compiler writes an intermediate result to memory if it needs more operations or reads than these. With
#: its own limits, a divergence that is weighted with an old policy's probabilities takes twice the kernels.
_OPTIONS: dict[str, Any] = {"realize_opcount_threshold": 200, "realize_reads_threshold": 40}
#: Kernels without sums get a grid of rows and columns. Without it a GPU divides integers to find the row of a
#: logit, which takes three times as many instructions as all the rest.
_ELEMENTWISE_OPTIONS = {**_OPTIONS, "triton.prefer_nd_tiling": True}


def _compiled(function: Callable[..., Any], is_elementwise: bool) -> Callable[..., Any]:
    if (key := (torch.compile, function, is_elementwise)) not in _functions:
        options = _ELEMENTWISE_OPTIONS if is_elementwise else _OPTIONS
        _functions[key] = torch.compile(function, dynamic=True, fullgraph=True, options=options)
    return _functions[key]
