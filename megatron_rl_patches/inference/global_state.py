"""Global state that building, loading and scoring a second model must leave as it was."""

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
    """Leave every random stream where it was, also when the body raises.

    Covers the global generators of Python, numpy and torch (CPU, and CUDA on the device that is current at
    entry), and Megatron's CUDA RNG tracker: its dropout and initialisation streams, as tensors or as
    generators for CUDA graphs.

    Creates no CUDA context: a CUDA generator that does not exist yet is not looked at, so what the body does
    to one that comes into being inside is not undone.
    """
    python_state, numpy_state, cpu_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.cuda.current_device() if has_cuda else None
    cuda_state = None if device is None else torch.cuda.get_rng_state(device)
    tracked = _tracked_states()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu_state)
        if device is not None and cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)
        _restore_tracker(tracked)


def cuda_rng_tracker() -> Any:
    """Megatron's tracker if there is one; asking Megatron for it would choose its class for good."""
    random_module = sys.modules.get("megatron.core.tensor_parallel.random")
    return getattr(random_module, "_CUDA_RNG_STATE_TRACKER", None)


def _tracked_states() -> dict[str, tuple[Any, torch.Tensor | None]]:
    """Per stream its state; a generator moves in place, so what it holds now comes along."""
    tracker = cuda_rng_tracker()
    states = {} if tracker is None else tracker.get_states()
    return {
        name: (state, state.get_state() if isinstance(state, torch.Generator) else None)
        for name, state in states.items()
    }


def _restore_tracker(tracked: dict[str, tuple[Any, torch.Tensor | None]]) -> None:
    tracker = cuda_rng_tracker()
    if tracker is None:
        return
    for state, held in tracked.values():
        if held is not None:
            state.set_state(held)
    if tracked:
        tracker.set_states({name: state for name, (state, _) in tracked.items()})
    elif tracker.get_states():
        tracker.reset()
