"""Recomputing a loss in backward instead of keeping what it computed in forward, never the reentrant way.

Reentrant checkpointing runs the first pass without grad mode, so a loss that asks ``is_grad_enabled()`` takes
another path in it, and one that then overwrites its logits recomputes from what it overwrote: in OpenClaw-RL
that made wrong gradients, not only slow ones. It also refuses ``torch.autograd.grad``. Hosts that pass no
``use_reentrant`` get it, as torch only warns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar, overload

import torch
import torch.distributed
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

P = ParamSpec("P")
R = TypeVar("R")


@overload
def checkpointed(
    loss_fn: Callable[P, R],
    *,
    enabled: bool = True,
    early_stop: bool | None = None,
    preserve_rng_state: bool = False,
) -> Callable[P, R]: ...


@overload
def checkpointed(
    loss_fn: None = None,
    *,
    enabled: bool = True,
    early_stop: bool | None = None,
    preserve_rng_state: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def checkpointed(
    loss_fn: Callable[P, R] | None = None,
    *,
    enabled: bool = True,
    early_stop: bool | None = None,
    preserve_rng_state: bool = False,
) -> Callable[P, R] | Callable[[Callable[P, R]], Callable[P, R]]:
    """The same loss with the same gradients, recomputed in backward (non-reentrant checkpointing).

    A decorator, with or without arguments, and a wrapper for the closure that Megatron's forward step
    returns::

        return output, checkpointed(partial(loss_func, batch))

    Inputs, whether arguments or closed over, tensors or not, and outputs, such as a dict of metrics, pass as
    they are. Without grad mode ``loss_fn`` is simply called. With it, ``loss_fn`` runs twice, so it must not
    count or append anything, and must compute the same both times.

    Args:
        loss_fn: what computes the loss.
        enabled: ``False`` returns ``loss_fn`` itself.
        early_stop: let the recomputation end as soon as backward has what it needs. It then skips the rest of
            the loss, and a rank that stops before a collective that its peers stop after leaves them waiting.
            ``None`` means no when there are several ranks, and torch's own setting otherwise.
        preserve_rng_state: draw the same random numbers in the recomputation. For a loss that draws some.
    """
    if loss_fn is None:
        return functools.partial(
            checkpointed, enabled=enabled, early_stop=early_stop, preserve_rng_state=preserve_rng_state
        )
    if not enabled:
        return loss_fn

    @functools.wraps(loss_fn)
    def recomputed(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return loss_fn(*args, **kwargs)
        # Bound here, as torch would take a keyword argument named like one of its own.
        function = functools.partial(loss_fn, **kwargs) if kwargs else loss_fn
        with _early_stop(early_stop):
            return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)

    return recomputed


def _early_stop(early_stop: bool | None) -> AbstractContextManager[None]:
    # The context manager, as older torch has no such argument of checkpoint(); it matters in forward only.
    if early_stop is None:
        return set_checkpoint_early_stop(False) if _several_ranks() else nullcontext()
    return set_checkpoint_early_stop(early_stop)


def _several_ranks() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
