"""Advantages from rewards alone, without a critic."""

from __future__ import annotations

import torch

from ..errors import InvalidInputError


def group_advantages(
    rewards: torch.Tensor, groups: torch.Tensor, *, divide_by_std: bool = True, eps: float = 1e-6
) -> torch.Tensor:
    """Advantage of each response over the other responses to the same prompt.

    ``(reward - mean) / (std + eps)`` over the group, as GRPO has it (arXiv 2402.03300, section 4.1.2), with
    the standard deviation of a sample (n - 1), as in verl and TRL. Dr. GRPO (arXiv 2503.20783) leaves the
    division out, since it favours prompts that are almost always or almost never solved.

    A group that got the same reward everywhere, or that is one response, has nothing to compare: zero.

    Args:
        rewards: one number per response, ``[b]``.
        groups: which prompt each response answers, any integers in any order, ``[b]``. Every group must be
            whole here: nothing is exchanged between ranks.
        divide_by_std: ``False`` for Dr. GRPO.
        eps: added to the standard deviation.

    Returns:
        ``[b]``, in the dtype of ``rewards`` (float32 for integers), without gradient.

    Raises:
        InvalidInputError: shapes differ or are not ``[b]``.
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
        advantages[members] = _over_the_rest(rewards[members], divide_by_std, eps)
    return advantages.to(dtype)


def _over_the_rest(rewards: torch.Tensor, divide_by_std: bool, eps: float) -> torch.Tensor:
    advantages = rewards - rewards.mean()
    if len(rewards) == 1 or not divide_by_std:
        return advantages
    return advantages / (rewards.std() + eps)
