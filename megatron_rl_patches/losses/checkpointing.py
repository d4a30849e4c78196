"""Activation checkpointing of a loss: backward computes it again instead of keeping its tensors.

Reentrant checkpointing, torch's default, is wrong for losses: its first pass runs without grad mode. A loss
that overwrites the logits in that mode is recomputed from the overwritten values, as it was in OpenClaw-RL.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ..errors import InvalidInputError

P = ParamSpec("P")
R = TypeVar("R")


def checkpointed(
    loss_fn: Callable[P, R],
    *,
    enabled: bool = True,
    early_stop: bool | None = None,
    preserve_rng_state: bool = False,
) -> Callable[P, R]:
    """Wrap a loss so that backward recomputes it (non-reentrant checkpointing); values and gradients stay.

    It is a decorator, and wraps the closure that a Megatron forward step returns::

        return output, checkpointed(partial(loss_func, batch))

    Arguments and results may be of any type. In grad mode ``loss_fn`` is called again in backward, so it must
    compute the same both times and have no side effects, such as appending to a list.

    Args:
        loss_fn: function that computes the loss.
        enabled: ``False`` returns ``loss_fn`` itself.
        early_stop: let the recomputation stop as soon as backward has its tensors; ranks that stop on
            different sides of a collective wait forever. ``None`` is torch's setting on a single rank only.
        preserve_rng_state: draw the same random numbers in the recomputation; for losses that draw any.
    """
    if not callable(loss_fn):
        raise InvalidInputError(f"loss_fn is {loss_fn!r}, expected a function")
    if not enabled:
        return loss_fn

    @functools.wraps(loss_fn)
    def recomputed(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return loss_fn(*args, **kwargs)
        function, others = _bound(loss_fn, args, kwargs)
        # A context manager, since older releases of torch have no such argument. Only forward reads it.
        several_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        stop = False if early_stop is None and several_ranks else early_stop
        with nullcontext() if stop is None else set_checkpoint_early_stop(stop):
            return checkpoint(function, *others, use_reentrant=False, preserve_rng_state=preserve_rng_state)

    return recomputed


def _bound(
    loss_fn: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., R], list[Any]]:
    """Return a function of those arguments that ``checkpoint()`` is to save, and these.

    Keyword arguments are bound, since ``checkpoint()`` takes some of these names for its own options. So are
    clones of deferred logits: hooks of saved tensors, such as ``save_on_cpu``, would give back others without
    a graph, and code that reads or overwrites the logits before backward may make ordinary ones of them.
    """
    kwargs = {name: x.clone() if _is_deferred(x) else x for name, x in kwargs.items()}
    deferred = {place: x.clone() for place, x in enumerate(args) if _is_deferred(x)}

    def function(*others: Any) -> R:
        remaining = iter(others)
        arguments = [deferred[place] if place in deferred else next(remaining) for place in range(len(args))]
        return loss_fn(*arguments, **kwargs)

    return function, [x for place, x in enumerate(args) if place not in deferred]


def _is_deferred(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and hasattr(x, "loss_source")
