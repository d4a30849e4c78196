"""The device of the tests in this folder: a GPU, or in a dry run of ``make gpu`` the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from tests.references.live_bytes import live_bytes

IS_DRY = bool(os.environ.get("GPU_DRY_RUN"))
DEVICE = torch.device("cpu" if IS_DRY else "cuda")

needs_gpu = [
    # Of torch about its own compiler, which differ from torch to torch.
    pytest.mark.filterwarnings("default"),
    pytest.mark.gpu,
    pytest.mark.skipif(not (IS_DRY or torch.cuda.is_available()), reason="there is no GPU"),
]


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most bytes that a call has allocated at once, beyond those allocated before it."""
    if DEVICE.type == "cpu":
        return live_bytes(call).peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
