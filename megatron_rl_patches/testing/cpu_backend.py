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


def _install() -> ExitStack:
    from unittest import mock

    import torch

    from . import cpu_adapters, cuda_redirect

    with ExitStack() as stack:
        for owner, values in [*cuda_redirect.replacements(), *cpu_adapters.replacements()]:
            present = {name: value for name, value in values.items() if hasattr(owner, name)}
            stack.enter_context(mock.patch.multiple(owner, **present))
        if "torch._dynamo" in sys.modules:
            # Functions that the import of megatron.core has compiled already run eagerly inside the block.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(cpu_adapters.filled_gaps())
        # It warns when the CPU's generator moves in the context of a CUDA generator: they are one here.
        rng_logger = logging.getLogger("megatron.core.tensor_parallel.random")
        stack.enter_context(mock.patch.object(rng_logger, "disabled", True))
        return stack.pop_all()


@contextmanager
def cpu_backend(*, transformer_engine: bool | str = False) -> Iterator[None]:
    """Run unmodified megatron-core, and code written for it, on the CPU.

    Inside the block ``device="cuda"`` means the CPU, streams and events of ``torch.cuda`` and
    ``torch.accelerator`` do nothing, and process groups with the NCCL backend are gloo groups: with and
    without a GPU, and whether or not torch was built with CUDA. On exit every attribute that was replaced is
    the identical original again, also when the body raises. Blocks may be nested.

    The redirect of device arguments holds for the thread that entered (torch's function modes belong to a
    thread) and for the backward passes that it starts; all threads see the replaced attributes.

    Enter the block **before** megatron is imported if you can: then its functions under ``torch.compile`` are
    plain ones for good; those that are compiled already run eagerly inside the block. A module that has done
    ``from torch.distributed import isend`` keeps that function; megatron-core does this nowhere that matters.

    The CPU cannot show races between streams, memory figures, kernels of TransformerEngine, FP8 and CUDA
    graphs.

    Args:
        transformer_engine: put a stand-in of TransformerEngine in place: plain torch that computes,
            communicates and marks parameters as its layers do. A string is the version that it stands for.
            Megatron must be imported inside such a block first, and then the stand-in stays for good.

    Raises:
        MegatronRLPatchesError: the stand-in is asked for, and TransformerEngine is installed, or megatron was
            imported without it.
    """
    global _depth, _installed
    from .cuda_redirect import CudaToCpu

    with ExitStack() as stack:
        with _lock:
            if transformer_engine:
                from .transformer_engine.install import stand_in

                stack.enter_context(stand_in(None if transformer_engine is True else transformer_engine))
            if _depth == 0:
                _installed = _install()
            _depth += 1
        try:
            with CudaToCpu():
                yield
        finally:
            with _lock:
                _depth -= 1
                if _depth == 0:
                    _installed.close()
