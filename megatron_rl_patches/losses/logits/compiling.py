"""Block functions, which are compiled for large logits if there is a compiler, and else run eagerly."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from .rows import SelectedRows

# Compiling the first function of a process takes some ten seconds, others one or two.
WORTHWHILE_ELEMENTS = 1 << 24
RETRY_SECONDS = 300.0
# Compiled variants of one function: dtypes, with or without temperature, mask, entropy, sizes of one, ...
# There are some hundreds, of which a program uses a few.
_VARIANTS = 1024
_DISABLING_VARIABLES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")

_log = logging.getLogger(__name__)
_no_retry_before = 0.0


class BlockFunction:
    """A function to be called for one block of rows after the other.

    With ``fused=True`` it is compiled, and what the compiler raises is raised. With ``"auto"`` it is compiled
    for large logits where there is a compiler, unless an environment variable of torch forbids it. If that
    fails, for instance since a disk is full, a warning names the cause, and this and later blocks run as
    plain operators; some minutes later compiling is tried again. What fails does so before any logits are
    overwritten with their gradient: the first kernel that writes there is the last one. So a block can always
    be computed again.

    Attributes:
        compiled: whether the function is called without buffers, since the compiler needs none. If compiling
            fails, this stays true, and plain operators allocate what they need.
    """

    def __init__(self, function: Callable[..., Any], rows: SelectedRows) -> None:
        fused = rows.options.fused
        self._function, self._required = function, fused is True
        self.compiled = self._required or (fused == "auto" and _is_worthwhile(rows))
        self._try = self.compiled

    def __call__(self, *args: Any) -> Any:
        if self._try:
            try:
                return _call_compiled(self._function, *args)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if self._required:
                    raise
                self._give_up(error)
        return self._function(*args)

    def _give_up(self, error: Exception) -> None:
        global _no_retry_before
        self._try, _no_retry_before = False, time.monotonic() + RETRY_SECONDS
        _log.warning(
            "torch.compile failed for %s, which goes on with plain operators: %s: %s",
            self._function.__name__,
            type(error).__name__,
            error,
        )


def _is_worthwhile(rows: SelectedRows) -> bool:
    if _is_disabled():
        return False
    large = (rows.num_logits or rows.n * rows.logits.shape[1]) >= WORTHWHILE_ELEMENTS
    return large and time.monotonic() >= _no_retry_before and _has_compiler(rows.logits.device.type)


def _is_disabled() -> bool:
    """Return whether torch.compile would return the functions as they are.

    They are slower than those with buffers, and need several tensors of the size of a block, which is larger
    for compiled functions.
    """
    return any(os.environ.get(name) == "1" for name in _DISABLING_VARIABLES)


@cache
def _has_compiler(device: str) -> bool:
    if device == "cuda":
        return importlib.util.find_spec("triton") is not None
    default = "clang++" if sys.platform == "darwin" else "g++"
    return device == "cpu" and shutil.which(os.environ.get("CXX", default)) is not None


def _call_compiled(function: Callable[..., Any], *args: Any) -> Any:
    # This import takes a second, so only compiled calls do it.
    import torch._dynamo.config as config

    # torch 2.6 has the limits under their former names.
    names = ("recompile_limit", "accumulated_recompile_limit")
    if not hasattr(config, "recompile_limit"):
        names = ("cache_size_limit", "accumulated_cache_size_limit")
    for logits in args[0] if isinstance(args[0], list) else args[:1]:
        if logits.dim() == 3:
            # Stretches of a width that is compiled in fit into registers of a GPU, which then reads each
            # stretch once: for its largest logit and for all sums.
            torch._dynamo.mark_static(logits, 2)
    with config.patch(dict.fromkeys(names, _VARIANTS)):
        return _compiled(function)(*args)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True)
