"""Statistics and gradients of a rank's own logits: compiled where that pays and works, else eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..errors import InvalidInputError
from . import _eager, _fused
from ._fused import Unavailable
from ._shard import Shard, Target, Term

Fused = bool | str  # False, True (an error where it is not possible) or "auto"


def statistics(shard: Shard, column: Tensor, entropy: bool, fused: Fused) -> list[Tensor]:
    """One pass over the shard's rows, for one or two softmaxes.

    Args:
        column: the target of each row among this rank's columns, ``[n, 1]``; -1 where it is not.
        entropy: whether the entropy is wanted as well.

    Returns:
        For the log-probabilities, then for the entropy if wanted and of a softmax of its own, as it is with
        a keep-mask: ``[2, n]`` or ``[3, n]`` in the shard's dtype, with ``z = (x - top) / temperature``,

        * ``top``, the largest logit, -inf where no column counts;
        * ``rest = sum(exp(z)) - 1``: the largest term is 1, and would swallow the digits of the others;
        * for the entropy ``moment = sum(exp(z) * z)``.
    """
    return _first_that_works(_fused.statistics, _eager.statistics, fused, shard, column, entropy)


def gradient(
    shard: Shard, kept: Term | None, full: Term | None, target: Target, in_place: bool, fused: Fused
) -> Tensor:
    """One pass over the shard's rows: the gradient of all logits ``[T, V / tp]``, zero in other rows.

    Args:
        kept: the part of the softmax over kept columns; with a keep-mask only.
        full: the part of the softmax over all columns.
        in_place: write it into the logits.
    """
    return _first_that_works(_fused.gradient, _eager.gradient, fused, shard, kept, full, target, in_place)


def _first_that_works(
    compiled: Callable[..., Any], eager: Callable[..., Any], fused: Fused, shard: Shard, *args: Any
) -> Any:
    if fused is True or (fused == "auto" and _fused.is_worthwhile(shard)):
        try:
            return compiled(shard, *args)
        except Unavailable as error:
            if fused is True:
                message = f"fused=True, but torch.compile makes no kernel of the loss: {error}"
                raise InvalidInputError(f'{message}. fused="auto" goes on without') from error
    return eager(shard, *args)
