"""Real megatron-core on a laptop: CUDA calls go to the CPU, NCCL calls to gloo."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_lock = threading.Lock()
_installed = ExitStack()
_depth = 0


def _rng_is_shared(record: logging.LogRecord) -> bool:
    # Megatron warns when the CPU generator moves inside a CUDA generator's context: here they are one.
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def _install() -> ExitStack:
    from unittest import mock

    import torch

    from . import _cuda_redirect, _gloo, _megatron_gaps

    with ExitStack() as stack:
        for owner, name, value in _cuda_redirect.replacements() + _gloo.replacements():
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, value))
        if "torch._dynamo" in sys.modules:
            # Functions that were compiled before, at the import of megatron.core, run eagerly meanwhile.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_megatron_gaps.filled())
        rng_logger = logging.getLogger("megatron.core.tensor_parallel.random")
        rng_logger.addFilter(_rng_is_shared)
        stack.callback(rng_logger.removeFilter, _rng_is_shared)
        return stack.pop_all()


def _acquire() -> None:
    global _depth, _installed
    with _lock:
        if _depth == 0:
            _installed = _install()
        _depth += 1


def _release() -> None:
    global _depth
    with _lock:
        _depth -= 1
        if _depth == 0:
            _installed.close()


@contextmanager
def cpu_backend() -> Iterator[None]:
    """Run unmodified megatron-core, and code written for it, on the CPU.

    Inside, ``device="cuda"`` means the CPU, CUDA streams and events do nothing, and process groups asked
    for with the NCCL backend are gloo groups. It always does so, also where there is a GPU. On exit every
    attribute it replaced is the identical original again, also when the body raises. Nesting is fine.

    The redirect of device arguments holds for the thread that entered (torch's function modes are per
    thread) and for the backward passes that it starts; replaced attributes are seen by all threads.

    Enter it **before** megatron is imported if you can. Bound at import, and therefore kept, are: the
    ``torch.compile`` that decorates Megatron's fused functions (entered before, they are plain functions,
    and stay so after exit; entered after, they are compiled already, and torch is told to run them eagerly
    while inside), and anybody's ``from torch.distributed import isend``-like copy of a replaced function.
    megatron-core itself, 0.12 to 0.19, keeps none that matters, so entering late works too.

    What it cannot show: races between streams, memory figures, TransformerEngine, FP8, CUDA graphs.
    """
    _acquire()
    try:
        from ._cuda_redirect import CudaToCpu

        with CudaToCpu():
            yield
    finally:
        _release()
