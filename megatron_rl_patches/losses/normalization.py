"""What a loss over responses is an average of, and how that average survives microbatches and ranks.

A mean of means is not the mean: neither Megatron's average over microbatches nor the one over data-parallel
replicas knows how much each of them holds. So a loss is returned as a **sum** together with its **count**,
and the one is divided by the other once, over the whole step. Two ways lead there:

- ``config.calculate_per_token_loss=True``: Megatron adds the sums, adds the counts over microbatches and
  ranks, and divides the gradients once. Nothing needs to be known beforehand.
- otherwise Megatron averages over microbatches and replicas, and each microbatch must divide by the *mean*
  count of a microbatch: :func:`mean_count` of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.distributed

from ..errors import InvalidInputError

Normalization = Literal["token", "sequence", "constant"]


def token_weights(
    loss_masks: Sequence[torch.Tensor],
    normalization: Normalization,
    constant_length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight of each token in the sum, and the count to divide the sum by.

    ======================  =============================  ===========================  =====================
    ``normalization``       weight of a token              count                        source
    ======================  =============================  ===========================  =====================
    ``"token"``             1                              tokens                       DAPO, arXiv 2503.14476
    ``"sequence"``          1 / tokens of its response     responses                    GRPO, arXiv 2402.03300
    ``"constant"``          1 / ``constant_length``        responses                    Dr. GRPO, 2503.20783
    ======================  =============================  ===========================  =====================

    Only tokens that the mask keeps have weight and count; a response without any counts for nothing.

    Args:
        loss_masks: per response, ``[response_length]``, zero where a token does not count.
        normalization: what the average is taken over.
        constant_length: a length, the same throughout training, such as the longest response allowed.

    Returns:
        weights ``[n]`` of all responses end to end, and the count, an int32 scalar (Megatron adds it to one).

    Raises:
        InvalidInputError: no responses at all, or a normalization that is none or lacks its length.
    """
    check(normalization, constant_length)
    if not loss_masks:
        raise InvalidInputError("there are no responses; give one that is wholly masked where there is none")
    weights = [(mask != 0).to(dtype) for mask in loss_masks]
    tokens_b = torch.stack([(mask != 0).sum() for mask in loss_masks])
    responses = (tokens_b > 0).sum().to(torch.int32)
    if normalization == "token":
        return torch.cat(weights), tokens_b.sum().to(torch.int32)
    if normalization == "constant":
        return torch.cat(weights) / float(constant_length or 1), responses
    return torch.cat([w / n for w, n in zip(weights, tokens_b.clamp(min=1), strict=True)]), responses


def mean_count(
    loss_masks: Sequence[torch.Tensor],
    num_microbatches: int,
    normalization: Normalization,
    *,
    data_parallel_group: torch.distributed.ProcessGroup | None = None,
) -> float:
    """Mean count of a microbatch in this step: the ``normalizer`` where Megatron averages microbatches.

    Args:
        loss_masks: of all responses of this replica in the step, over all microbatches.
        num_microbatches: of this replica in the step.
        normalization: as in :func:`token_weights`.
        data_parallel_group: the replicas, **without** context parallelism; one all-reduce of two numbers.
            ``None``: this replica is the only one.

    Returns:
        Count over all replicas / microbatches over all replicas; 1 if nothing counts, as the loss is 0 then.
    """
    _, count = token_weights(loss_masks, normalization, constant_length=1)
    total = torch.stack([count.double(), torch.full_like(count, num_microbatches).double()])
    if data_parallel_group is not None:
        torch.distributed.all_reduce(total, group=data_parallel_group)
    return float(total[0] / total[1]) or 1.0


def check(normalization: str, constant_length: int | None) -> None:
    """Raise :class:`InvalidInputError` unless the two fit together."""
    known = get_args(Normalization)
    if normalization not in known:
        raise InvalidInputError(f"normalization is {normalization!r}; it must be one of {known}")
    if normalization == "constant" and (constant_length is None or constant_length <= 0):
        raise InvalidInputError(
            f"normalization 'constant' divides by constant_length, which is {constant_length}; give a length "
            "that stays the same throughout training, such as the longest response allowed"
        )
