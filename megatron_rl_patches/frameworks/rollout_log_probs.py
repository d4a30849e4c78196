"""Log-probs of the same tokens by the inference engine and by Megatron, compared once per rollout.

slime, vime and miles have both in the data of a rollout: ``rollout_log_probs`` as sampled, and ``log_probs``
that Megatron computed of the same weights before training. verl reports their difference as a metric itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..reentry import checks

#: Mean difference in nats per token from which on it is reported. bfloat16 on both sides gives 0.01 to 0.05.
THRESHOLD = 0.1
_SETTING = "rollout_log_probs"


def check(data_iterator: Any) -> None:
    """Report a difference above the threshold, once per process.

    Args:
        data_iterator: what ``train()`` of a framework takes under this name: iterators, each with its
            ``rollout_data``. Iterators without such data are not looked at.
    """
    if checks.has_found(_SETTING):
        return
    first = data_iterator[0] if isinstance(data_iterator, Sequence) and data_iterator else None
    rollout = getattr(first, "rollout_data", None)
    if not isinstance(rollout, Mapping):
        return
    trained, sampled = rollout.get("log_probs"), rollout.get("rollout_log_probs")
    if not trained or not sampled:
        return
    difference = _difference(trained, sampled, _masks(rollout, trained))
    if difference is None:
        return
    mean, largest, tokens = difference
    if mean > THRESHOLD:
        checks.report(
            f"rollout_log_probs: the log-probs of the inference engine and of Megatron differ by {mean:.2g} "
            f"nats per token on average and {largest:.2g} at most, on {tokens} tokens of this rank; up to "
            f"{THRESHOLD:g} on average is usual. The policy that samples is not the one that is trained. "
            "Look for weights that were sent before they were gathered, another precision, another "
            "temperature, or experts that are chosen differently",
            setting=_SETTING,
            aloud=checks.is_first_of_stage(),
        )


def _difference(
    trained: Sequence[Any], sampled: Sequence[Any], masks: Sequence[Any] | None
) -> tuple[float, float, int] | None:
    """Return mean and largest difference, and the number of tokens; ``None`` if they cannot be compared."""
    import torch

    lengths = [len(values) for values in trained]
    if lengths != [len(values) for values in sampled]:
        return None
    absolute = (_joined(trained) - _joined(sampled)).abs()
    if masks is not None:
        absolute = absolute[_joined(masks).to(absolute.device).bool()]
    if not len(absolute):
        return None
    mean, largest = torch.stack([absolute.mean(), absolute.max()]).tolist()
    return mean, largest, len(absolute)


def _joined(values: Sequence[Any]) -> Any:
    import torch

    return torch.cat([torch.as_tensor(value).detach().float().reshape(-1) for value in values])


def _masks(rollout: Mapping[str, Any], trained: Sequence[Any]) -> Sequence[Any] | None:
    """Return the loss masks of the tokens that the log-probs are of, or ``None`` if these are not known."""
    masks = rollout.get("loss_masks")
    if not masks:
        return None
    lengths = [len(values) for values in trained]
    if lengths == [len(mask) for mask in masks]:
        return list(masks)
    # Log-probs of a context-parallel rank are of its zigzag share of each response, and masks of all tokens.
    import torch
    from megatron.core import parallel_state

    from ..losses.sequences.layout import SequenceLayout

    layout = SequenceLayout.build(
        rollout["total_lengths"],
        rollout["response_lengths"],
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
    )
    if lengths != list(layout.local_lengths):
        return None
    return layout.local_parts([torch.as_tensor(mask).cpu() for mask in masks])
