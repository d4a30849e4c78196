"""Random streams, which building, loading and scoring a second model must not move."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Put every random stream back at the end, also if the body raises.

    It covers the global generators of Python, numpy and torch (CPU, and CUDA on the device that is current at
    entry, if there is a CUDA context), and the streams of Megatron's CUDA RNG tracker, be they tensors or
    generators. Numbers that another thread draws meanwhile are drawn again later.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    tracker = cuda_rng_tracker()
    tracked = {} if tracker is None else tracker.get_states()
    # Drawing changes a generator in place, so its state is copied.
    moving = {state: state.get_state() for state in tracked.values() if isinstance(state, torch.Generator)}
    has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if has_cuda else []):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for generator, state in moving.items():
            generator.set_state(state)
        # The tracker may have been made within the block.
        if (tracker := cuda_rng_tracker()) is not None:
            if tracked:
                tracker.set_states(tracked)
            elif tracker.get_states():
                tracker.reset()


def cuda_rng_tracker() -> Any:
    """Return Megatron's tracker if there is one; Megatron's own getter would create it and fix its class."""
    random_module = sys.modules.get("megatron.core.tensor_parallel.random")
    return getattr(random_module, "_CUDA_RNG_STATE_TRACKER", None)
