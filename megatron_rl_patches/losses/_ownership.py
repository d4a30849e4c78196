"""Whose logits these are: what may be overwritten with a gradient, and what has been.

Autograd's version counters stop every operation that saved the logits before they were overwritten. What
reads them *after* they do not stop: a loss computed again, from what is a gradient by now, as in a second
backward through checkpointing. So that is noted on the storage, which all views have in common.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ..errors import InvalidInputError

_LOAN = "_loss_loan"
_GRADIENT_VERSION = "_loss_gradient_version"


class Loan:
    """Lives as long as the backward that may overwrite the logits."""


def lend(logits: Tensor) -> Loan:
    """Give the logits' storage away to a backward, or say why not."""
    storage = logits.untyped_storage()
    base = logits if logits._base is None else logits._base
    if base.is_leaf and base.requires_grad:
        raise InvalidInputError(
            "inplace_backward would overwrite a leaf that requires grad: give the output of an operation, "
            "or inplace_backward=False"
        )
    repeats = any(
        size > 1 and stride == 0 for size, stride in zip(logits.shape, logits.stride(), strict=True)
    )
    if repeats or storage.nbytes() != logits.numel() * logits.element_size():
        raise InvalidInputError(
            "inplace_backward needs logits with a storage of their own, and these are a part of something "
            "larger: give the whole (rows= selects), or inplace_backward=False"
        )
    earlier = getattr(storage, _LOAN, None)
    # Checkpointing calls a second time, within backward, for the same loss.
    if earlier is not None and earlier() is not None and torch._C._current_graph_task_id() == -1:
        raise InvalidInputError(
            "these logits were given to another inplace_backward: only one loss can have their storage; "
            "use vocab_parallel_log_probs_and_entropy for both, or inplace_backward=False"
        )
    loan = Loan()
    setattr(storage, _LOAN, weakref.ref(loan))
    return loan


def note_overwritten(logits: Tensor) -> None:
    """The logits hold a gradient as long as nobody writes to them."""
    storage = logits.untyped_storage()
    setattr(storage, _LOAN, None)
    setattr(storage, _GRADIENT_VERSION, logits._version)


def refuse_overwritten(logits: Tensor) -> None:
    version = getattr(logits.untyped_storage(), _GRADIENT_VERSION, None)
    if version is not None and not logits.is_inference() and version == logits._version:
        raise InvalidInputError(
            "these logits were overwritten with their gradient by an inplace_backward: compute what reads "
            "them before, run backward once, or use inplace_backward=False"
        )
