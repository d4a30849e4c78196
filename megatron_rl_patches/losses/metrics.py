"""Metrics as ``[sum, count]`` pairs: the only form whose average over microbatches and ranks is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed


def sums_and_counts(
    values: Mapping[str, torch.Tensor], weights_n: torch.Tensor, count: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Detached ``[2]`` pairs: the weighted sum of each of the values, ``[n]``, and ``count``."""
    return {
        name: torch.stack([(weights_n * value.detach()).sum(), count.to(weights_n.dtype)])
        for name, value in values.items()
    }


def maximum(values_n: torch.Tensor, mask_n: torch.Tensor) -> torch.Tensor:
    """The greatest of non-negative values as a pair with count 1; 0 where the mask keeps none."""
    values_n = values_n.detach() * mask_n
    one = values_n.new_ones(1)
    return torch.stack([torch.cat([values_n, 0 * one]).max(), one[0]])


def average_metrics(
    reports: Sequence[Mapping[str, torch.Tensor]], group: torch.distributed.ProcessGroup | None = None
) -> dict[str, float]:
    """Averages of the metrics of a loss over microbatches and, given a group, over ranks.

    Args:
        reports: one dict per microbatch, what ``get_forward_backward_func()(...)`` returns on the last
            pipeline stage; empty on the others.
        group: data-parallel group of that stage, with or without context parallelism. Two all-reduces.

    Returns:
        Sum over count (``nan`` where nothing was counted); the maximum for names that end in ``_max``.
    """
    if not reports:
        return {}
    names = sorted(reports[0])
    values = torch.stack([torch.stack([report[name] for report in reports]) for name in names])
    pairs, highest = values.sum(1), values[:, :, 0].amax(1)
    if group is not None:
        torch.distributed.all_reduce(pairs, group=group)
        torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX, group=group)
    averages = (pairs[:, 0] / pairs[:, 1]).tolist()
    maxima = highest.tolist()
    return {
        name: top if name.endswith("_max") else average
        for name, average, top in zip(names, averages, maxima, strict=True)
    }
