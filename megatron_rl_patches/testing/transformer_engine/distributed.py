"""States of random numbers, and activation checkpoints that restore them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor


class CudaRNGStatesTracker:
    """Named states of the generator of random numbers."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Add a state that a seed makes."""
        if seed in self.seeds_ or name in self.states_:
            raise RuntimeError(f"state {name!r} with seed {seed}: the name or the seed is there already")
        self.seeds_.add(seed)
        before = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(seed)
        self.states_[name] = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the state in the context."""
        before = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(before)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Call the function again in the backward pass, with the states that the tracker has now."""
    tracker = get_rng_state_tracker() if get_rng_state_tracker else CudaRNGStatesTracker()
    states = tracker.get_states()
    is_first = True

    def call(*inputs: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            return function(*inputs, **kwargs)
        current = tracker.get_states()
        tracker.set_states(states)
        try:
            return function(*inputs, **kwargs)
        finally:
            tracker.set_states(current)

    return torch.utils.checkpoint.checkpoint(call, *args, use_reentrant=use_reentrant)


def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> AbstractContextManager[None]:
    """Do nothing: FP8 alone has something to do in recomputations."""
    return nullcontext()


def is_fp8_activation_recompute_enabled() -> bool:
    return False
