"""Log-probabilities and entropies in the conventions of slime, miles and verl, for the patch ``lean-loss``.

In these hosts one function knows the options (it takes ``args``) and another one computes; :func:`scoring`
tells the second what the first knows, and brings back what the first needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from .vocab_parallel import vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy

if TYPE_CHECKING:
    from .samples import Samples

_IGNORED = -100
_HAS_ENTROPY = "_loss_has_entropy"


@dataclass
class Scoring:
    """Options of the scoring function that runs, and what became of them.

    Attributes:
        temperature: by which the host has not divided the logits.
        entropy_grad: whether any loss depends on the entropy.
        with_entropy: compute the entropy beside the log-probabilities, where the host asks for these only.
        entropy: what ``with_entropy`` asked for, of the last call.
        samples: set where the host's function has row numbers in place of logits.
    """

    temperature: float = 1.0
    entropy_grad: bool = True
    with_entropy: bool = False
    entropy: Tensor | None = None
    samples: Samples | None = None


_current: ContextVar[Scoring | None] = ContextVar("megatron_rl_patches_scoring", default=None)


@contextmanager
def scoring(
    *, temperature: float = 1.0, entropy_grad: bool = True, with_entropy: bool = False
) -> Iterator[Scoring]:
    """The options that hold for the functions that compute, for the length of the block."""
    scope = Scoring(temperature, entropy_grad, with_entropy)
    token = _current.set(scope)
    try:
        yield scope
    finally:
        _current.reset(token)


def current_scoring() -> Scoring:
    """Of the innermost :func:`scoring`; outside of any, one that nobody reads."""
    return _current.get() or Scoring()


def score(
    logits: Tensor,
    tokens: Tensor,
    group: dist.ProcessGroup | None,
    *,
    rows: Tensor | None = None,
    with_entropy: bool = False,
    entropy_grad: bool = True,
    keep_mask: Tensor | None = None,
    temperature: float = 1.0,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of the tokens, and entropies or ``None``, in the shape of the tokens and in float32.

    Args:
        logits: ``[..., vocab / tp]``.
        tokens: ``[...]``, or ``[n]`` with ``rows``. Hosts look up prompts and padding too, so an id outside
            of the vocabulary is no error: it has log-probability and entropy 0.
        group: tensor-parallel group; ``None`` is the default group where there is one, as it is to
            ``torch.distributed`` and hence to hosts.
        rows: numbers ``[n]`` of the rows to score.
        inplace_backward: where the logits may be overwritten, see :func:`vocab_parallel_log_probs`.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    vocab_size = logits.shape[-1] * (1 if group is None else dist.get_world_size(group))
    targets = tokens.reshape(-1).long()
    targets = torch.where((targets >= 0) & (targets < vocab_size), targets, _IGNORED)
    logits_tv = logits.reshape(-1, logits.shape[-1])
    in_place = inplace_backward and _may_be_overwritten(logits_tv)
    if not with_entropy:
        log_probs = vocab_parallel_log_probs(
            logits_tv,
            targets,
            tp_group=group,
            rows=rows,
            keep_mask=keep_mask,
            temperature=temperature,
            inplace_backward=in_place,
            ignore_index=_IGNORED,
        )
        return log_probs.view(tokens.shape), None
    log_probs, entropies = vocab_parallel_log_probs_and_entropy(
        logits_tv,
        targets,
        tp_group=group,
        rows=rows,
        keep_mask=keep_mask,
        temperature=temperature,
        inplace_backward=in_place,
        ignore_index=_IGNORED,
        entropy_grad=entropy_grad,
    )
    return log_probs.view(tokens.shape), entropies.view(tokens.shape)


def entropy(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Entropies ``[...]`` of logits ``[..., vocab / tp]``."""
    any_token = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    _, entropies = score(logits, any_token, group, with_entropy=True)
    assert entropies is not None
    if entropies.requires_grad:
        setattr(logits.untyped_storage(), _HAS_ENTROPY, True)
    return entropies


def _may_be_overwritten(logits: Tensor) -> bool:
    """An intermediate result with a storage of its own, in the one dtype that Megatron overwrites as well.

    Not if an entropy of the same logits is still to be differentiated.
    """
    base = logits if logits._base is None else logits._base
    storage = logits.untyped_storage()
    is_whole = storage.nbytes() == logits.numel() * logits.element_size()
    is_leaf = base.is_leaf and base.requires_grad
    return logits.dtype == torch.float32 and is_whole and not is_leaf and not hasattr(storage, _HAS_ENTROPY)
