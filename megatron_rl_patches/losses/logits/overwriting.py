"""Who may overwrite the logits with their gradient, and who reads them after that.

Autograd's version counters stop every operation that saved the logits before they were overwritten. They do
not stop an operation that reads them *afterwards*: a loss that is computed again, as in a second backward
through checkpointing, would take the gradient for logits. So the fact is recorded on the storage, which all
views of the logits have in common.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ...common.text import listed
from ...errors import InvalidInputError

_CLAIM = "_loss_storage_claim"
_GRADIENT_VERSION = "_loss_gradient_version"

_LEAF = (
    "inplace_backward would overwrite a leaf that requires grad: pass the output of an operation, "
    "or inplace_backward=False"
)
_PART = (
    "inplace_backward needs logits with a storage of their own, and these are a part of something "
    "larger: pass the whole (rows= selects), or inplace_backward=False"
)
_CLAIMED = (
    "these logits were given to another inplace_backward: only one loss can have their storage; "
    "use vocab_parallel_log_probs_and_entropy for both, or inplace_backward=False"
)
_REASONS = (None, _LEAF, _PART, _CLAIMED)


class StorageClaim:
    """The right of a backward to overwrite the logits; it lives as long as the graph of the loss.

    Each rank decides by its own logits whether they can be overwritten. A rank that refuses must not leave
    the others waiting for it, so the refusal travels with the collective of the forward; see :meth:`check`.

    Attributes:
        asked_for: whether ranks tell each other that they can overwrite their logits; alike on all ranks.
        reason: why the logits of this rank cannot be overwritten, as an index into ``_REASONS``; 0: they can.
    """

    def __init__(self, asked_for: bool, reason: int = 0) -> None:
        self.asked_for, self.reason = asked_for, reason

    def marker(self, like: Tensor, size: int) -> Tensor:
        return like.new_full((size,), self.reason)

    def check(self, gathered: Tensor) -> None:
        """Raise if the marker of any rank, in ``gathered`` ``[tp]``, names a reason.

        On a CPU this is on every rank alike. On a GPU only ranks that refuse raise; the kernels of the others
        stop with a device-side assertion, which their processes see at some later call of CUDA.
        """
        if gathered.device.type == "cuda" and not self.reason:
            # Reading the values would make the CPU wait for the GPU.
            torch._assert_async((gathered == 0).all(), "another rank refused inplace_backward")
            return
        reasons = [int(reason) for reason in gathered.tolist()]
        ranks = [rank for rank, reason in enumerate(reasons) if reason]
        if ranks:
            where = f" (of ranks {listed(ranks)} of tp_group)" if len(reasons) > 1 else ""
            raise InvalidInputError(f"{_REASONS[self.reason or reasons[ranks[0]]]}{where}")


def claim_storage(logits: Tensor, claim: StorageClaim, inplace_backward: bool) -> StorageClaim:
    """Claim the logits' storage for a backward, if one will overwrite it."""
    if inplace_backward and torch.is_grad_enabled() and logits.requires_grad:
        reason = _reason_against(logits)
        claim.reason = _REASONS.index(reason)
        if reason is None:
            setattr(logits.untyped_storage(), _CLAIM, weakref.ref(claim))
    return claim


def _reason_against(logits: Tensor) -> str | None:
    base = logits if logits._base is None else logits._base
    if base.is_leaf and base.requires_grad:
        return _LEAF
    repeats = any(
        size > 1 and stride == 0 for size, stride in zip(logits.shape, logits.stride(), strict=True)
    )
    storage = logits.untyped_storage()
    if repeats or storage.nbytes() != logits.numel() * logits.element_size():
        return _PART
    earlier = getattr(storage, _CLAIM, None)
    # Activation checkpointing computes the same loss a second time, within backward.
    if earlier is not None and earlier() is not None and torch._C._current_graph_task_id() == -1:
        return _CLAIMED
    return None


def mark_overwritten(logits: Tensor) -> None:
    """Record that the logits hold a gradient. The record is void once something writes to them again."""
    storage = logits.untyped_storage()
    setattr(storage, _CLAIM, None)
    setattr(storage, _GRADIENT_VERSION, logits._version)


def check_not_overwritten(logits: Tensor) -> None:
    """Raise where the logits hold a gradient, see :func:`mark_overwritten`."""
    version = getattr(logits.untyped_storage(), _GRADIENT_VERSION, None)
    if version is not None and not logits.is_inference() and version == logits._version:
        raise InvalidInputError(
            "these logits were overwritten with their gradient by an inplace_backward: compute what reads "
            "them before, run backward once, or use inplace_backward=False"
        )
