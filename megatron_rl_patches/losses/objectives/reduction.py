"""Averages of losses and metrics that are right over microbatches and ranks.

Microbatches and replicas hold different numbers of tokens, so a mean of their means is not the mean. Losses
and metrics are therefore **sums** with their **counts**, which are divided once, over the whole step, as
Megatron does with ``config.calculate_per_token_loss=True``. Without it Megatron averages over microbatches
and replicas, and each microbatch must divide its sum by :func:`mean_count`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
import torch.distributed
from torch import Tensor

from ...common.agreement import agreed
from ...errors import InvalidInputError
from ..vocab.arguments import check_lengths, check_list, check_positive

Normalization = Literal["token", "sequence", "constant"]
#: A loss as a sum, the count to divide it by, and metrics, as Megatron's schedules take them.
LossAndCount = tuple[Tensor, Tensor, dict[str, Tensor]]


def token_weights(
    loss_masks: Sequence[Tensor],
    normalization: Normalization,
    constant_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weight of each token in the sum, and the count to divide the sum by.

    ======================  =============================  ===========================  =====================
    ``normalization``       weight of a token              count                        source
    ======================  =============================  ===========================  =====================
    ``"token"``             1                              tokens                       DAPO, arXiv 2503.14476
    ``"sequence"``          1 / tokens of its response     responses                    GRPO, arXiv 2402.03300
    ``"constant"``          1 / ``constant_length``        responses                    Dr. GRPO, 2503.20783
    ======================  =============================  ===========================  =====================

    Masked tokens have no weight and are not counted, nor are responses that are wholly masked.

    Args:
        loss_masks: one mask ``[response_length]`` per response, zero for tokens without loss; or all of them
            padded with zeros, ``[responses, length]``.
        normalization: what the average is taken over.
        constant_length: the same throughout training, such as the longest response allowed.

    Returns:
        The weights ``[n]`` of the tokens of all responses, float32; and the count, int32 as Megatron needs.

    Raises:
        InvalidInputError: there are no responses, the normalization is unknown, or its length is missing.
    """
    check_normalization(normalization, constant_length)
    return weights_and_count(check_masks(loss_masks), normalization, constant_length, torch.float32)


def weights_and_count(
    loss_masks: Sequence[Tensor], normalization: str, constant_length: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return what :func:`token_weights` does, without checks."""
    weights = [(mask != 0).to(dtype) for mask in loss_masks]
    tokens_b = torch.stack([(mask != 0).sum() for mask in loss_masks])
    count = tokens_b.sum() if normalization == "token" else (tokens_b > 0).sum()
    if normalization == "sequence":
        weights = [w / n for w, n in zip(weights, tokens_b.clamp(min=1), strict=True)]
    divisor = float(constant_length or 1) if normalization == "constant" else 1.0
    return torch.cat(weights) / divisor, count.to(torch.int32)


def mean_count(
    loss_masks: Sequence[Tensor],
    num_microbatches: int,
    normalization: Normalization,
    *,
    data_parallel_group: torch.distributed.ProcessGroup | None = None,
) -> float:
    """Return the mean count of this step's microbatches, which is the ``normalizer`` of the loss functions.

    Args:
        loss_masks: masks of all responses of this replica in this step, ``[response_length]`` each.
        num_microbatches: number of microbatches of this replica in this step.
        normalization: as in :func:`token_weights`.
        data_parallel_group: the replicas, **without** context parallelism; one small all-gather runs over it.

    Returns:
        Count of all replicas by their number of microbatches; 1 if every token is masked, so the loss is 0.

    Raises:
        InvalidInputError: as :func:`token_weights`, or there are no microbatches; on every replica, if it
            happens on one.
    """
    counts, problem = (0, 0.0), None
    try:
        _, count = token_weights(loss_masks, normalization, constant_length=1)
        number = check_positive("num_microbatches", num_microbatches)
        counts = int(count), number
    except InvalidInputError as error:
        problem = str(error)
    counted, microbatches = zip(*agreed(counts, problem, data_parallel_group), strict=True)
    return sum(counted) / sum(microbatches) or 1.0


def check_normalization(normalization: str, constant_length: int | None) -> None:
    known = get_args(Normalization)
    if not isinstance(normalization, str) or normalization not in known:
        raise InvalidInputError(f"normalization is {normalization!r}; it must be one of {known}")
    if normalization == "constant":
        check_positive("the divisor of the normalization 'constant', constant_length,", constant_length)


def check_masks(loss_masks: Sequence[Tensor]) -> list[Tensor]:
    """Return the masks ``[response_length]`` as a list; refuse none at all."""
    masks = check_list("loss_masks", loss_masks)
    for mask in masks or [torch.empty(())]:
        if mask.dim() != 1 or mask.dtype.is_complex:
            shapes = f"loss_masks have the shapes {[tuple(mask.shape) for mask in masks]}"
            expected = "[response_length] for each response, real; if there are none, pass one wholly masked"
            raise InvalidInputError(f"{shapes}, expected {expected}")
    return masks


def check_responses(
    name: str, values: Sequence[Tensor], lengths: Sequence[int], *, scalars: bool = False
) -> list[Tensor]:
    """Return tensors ``[length]``, one per response, as a list; with ``scalars`` some may be ``[]``."""
    tensors = check_lengths(name, values, lengths, "the loss masks", most=1, scalars=scalars)
    for tensor in tensors:
        if tensor.dtype == torch.bool or tensor.dtype.is_complex:
            raise InvalidInputError(f"{name} are {tensor.dtype}, expected a floating dtype")
    return tensors


def by_response(values_n: Tensor, mask_n: Tensor, lengths: list[int], mean: bool = True) -> Tensor:
    """Return for each token the mean or the sum of its response's values, which are zero where masked."""
    pairs = zip(torch.split(values_n, lengths), torch.split(mask_n, lengths), strict=True)
    totals = ((part.sum() / (mask.sum().clamp(min=1) if mean else 1), len(part)) for part, mask in pairs)
    return torch.cat([total.expand(length) for total, length in totals])


def metrics_of(
    in_loss: Mapping[str, Tensor], per_token: Mapping[str, Tensor], weights_n: Tensor, count: Tensor
) -> dict[str, Tensor]:
    """Return detached ``[sum, count]`` pairs of values ``[n]``.

    Values ``in_loss`` are weighted like the loss, values ``per_token`` unweighted over tokens with a weight.
    """
    mask_n = (weights_n > 0).to(weights_n.dtype)
    groups = ((in_loss, weights_n, count), (per_token, mask_n, mask_n.sum()))
    return {
        name: torch.stack([(weights * value.detach()).sum(), total.to(weights.dtype)])
        for values, weights, total in groups
        for name, value in values.items()
    }


def average_metrics(
    reports: Sequence[Mapping[str, Tensor]], group: torch.distributed.ProcessGroup | None = None
) -> dict[str, float]:
    """Return the averages of a loss's metrics over microbatches and ranks.

    Args:
        reports: one dict of ``[sum, count]`` pairs per microbatch, which ``get_forward_backward_func()(...)``
            returns on the last pipeline stage; empty on the other stages.
        group: data-parallel process group of that stage, over which one small all-gather runs.

    Returns:
        Sum divided by count, ``nan`` where the count is zero; and the maximum for names that end in ``_max``.

    Raises:
        InvalidInputError: metrics of some microbatch have other names, or are no pairs; on every rank.
    """
    reports, problem = list(reports or ()), None
    if not all(isinstance(report, Mapping) for report in reports):
        reports, problem = [], "reports: expected a dict per microbatch"
    names = sorted(reports[0]) if reports else []
    for number, report in enumerate(reports):
        if sorted(report) != names:
            has = f"that of microbatch {number} has {sorted(report)}"
            problem = f"reports: {has}, that of microbatch 0 {names}"
        elif wrong := [name for name in names if getattr(report[name], "shape", ()) != (2,)]:
            problem = f"reports: {wrong[0]!r} is {report[wrong[0]]!r}, expected a tensor [sum, count]"
    values = {} if problem else {name: torch.stack([one[name] for one in reports]).cpu() for name in names}
    ranks = agreed(values, problem, group)
    all_names = [list(of_rank) for of_rank in ranks]
    for rank, own in enumerate(all_names):
        if own != all_names[0]:
            raise InvalidInputError(f"reports: rank {rank} of the group has {own}, rank 0 {all_names[0]}")
    averages = {}
    for name in names:
        pairs = torch.cat([of_rank[name] for of_rank in ranks])
        total, count = pairs.sum(0)
        averages[name] = float(pairs[:, 0].max() if name.endswith("_max") else total / count)
    return averages
