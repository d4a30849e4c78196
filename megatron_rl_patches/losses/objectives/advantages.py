"""Advantages from rewards alone, without a critic."""

from __future__ import annotations

import torch

from ...errors import InvalidInputError


def group_advantages(
    rewards: torch.Tensor, groups: torch.Tensor, *, divide_by_std: bool = True, eps: float = 1e-6
) -> torch.Tensor:
    """Return the advantage of each response over the other responses to the same prompt.

    It is ``(reward - mean) / (std + eps)`` over the group of responses, as in GRPO (arXiv 2402.03300, section
    4.1.2), with the standard deviation of a sample (n - 1), as in verl and TRL. Dr. GRPO (arXiv 2503.20783)
    does not divide, since the division favors prompts that are almost always or almost never solved. It is
    zero in a group of one response, or of equal rewards.

    Args:
        rewards: reward of each response, ``[b]``; another shape raises :class:`InvalidInputError`.
        groups: an integer for each response, ``[b]``, the same for responses to the same prompt. This rank
            must have all responses of a group: no collective runs.
        divide_by_std: ``False`` gives the advantages of Dr. GRPO.
        eps: number added to the standard deviation.

    Returns:
        The advantages ``[b]`` in the dtype of ``rewards`` (float32 for integers), without gradient.
    """
    if rewards.ndim != 1 or rewards.shape != groups.shape:
        raise InvalidInputError(
            f"rewards {list(rewards.shape)} and groups {list(groups.shape)} must both be [b], b responses"
        )
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    # In float64, so that equal rewards give zero, not a rounding error divided by eps.
    rewards = rewards.detach().double()
    advantages = torch.empty_like(rewards)
    for group in set(groups.tolist()):
        members = groups == group
        in_group = rewards[members]
        divisor = in_group.std() + eps if divide_by_std and len(in_group) > 1 else 1.0
        advantages[members] = (in_group - in_group.mean()) / divisor
    return advantages.to(dtype)
