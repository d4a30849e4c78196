"""States of random numbers, activation checkpoints that restore them, and communication, which is Megatron's.

Sequences lie along the first dimension. Megatron must not be imported before the stand-in is in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from .refusals import refuse, require


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
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

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
    if {"context_fn", "determinism_check", "debug"} & kwargs.keys():
        refuse("context_fn, determinism_check or debug of checkpoint()")
    tracker = get_rng_state_tracker() if get_rng_state_tracker else CudaRNGStatesTracker()
    first: dict[str, Any] | None = None

    def call(*inputs: Any) -> Any:
        nonlocal first
        now = tracker.get_states()
        if first is None:
            first = now
            return function(*inputs, **kwargs)
        tracker.set_states(first)
        try:
            return function(*inputs, **kwargs)
        finally:
            tracker.set_states(now)

    return torch.utils.checkpoint.checkpoint(call, *args, use_reentrant=use_reentrant)


def positions_of(rank: int, size: int, rows: int) -> Tensor:
    """Return the positions of a rank's rows: a piece from either end, as Megatron cuts sequences."""
    if size == 1:
        return torch.arange(rows)
    require((rows % 2 == 0, f"{rows} rows on a rank, which are not two pieces of the same length"))
    pieces = torch.arange(rows * size).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


def enter(x: Tensor, group: Any, is_split: bool) -> Tensor:
    """Return all of a sequence, of which each rank has a part or all; gradients are sums over the ranks."""
    from megatron.core.tensor_parallel import mappings as m

    gather, copy = m.gather_from_sequence_parallel_region, m.copy_to_tensor_model_parallel_region
    return (gather if is_split else copy)(x, group=group)


def leave(x: Tensor, group: Any, is_split: bool) -> Tensor:
    """Return the sum over the ranks: a rank's part of the sequence, or all of it."""
    from megatron.core.tensor_parallel import mappings as m

    scatter, reduce = m.reduce_scatter_to_sequence_parallel_region, m.reduce_from_tensor_model_parallel_region
    return (scatter if is_split else reduce)(x, group=group)
