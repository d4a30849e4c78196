"""Log-probs of the same tokens by the inference engine and by Megatron, compared once per rollout.

slime, vime and miles have both in the data of a rollout where they compute the policy's log-probs before
training: ``rollout_log_probs`` as sampled, and ``log_probs`` of Megatron. With one step per rollout they take
those of the loss, and with ``--use-rollout-logprobs`` they need none: then nothing is compared here, and
slime's own metric ``train_rollout_logprob_abs_diff`` tells. verl has a metric, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..reentry import training_warnings

#: A mean difference above this, in nats per token, is reported. bfloat16 on both sides gives 0.01 to 0.05.
THRESHOLD = 0.1
_SETTING = "rollout_log_probs"


def check(data_iterator: Any) -> None:
    """Report a difference above the threshold, once per process.

    Args:
        data_iterator: what ``train()`` of a framework takes under this name: iterators, each with its
            ``rollout_data``. Iterators without such data are not looked at.
    """
    if training_warnings.was_reported(_SETTING):
        return
    first = data_iterator[0] if isinstance(data_iterator, Sequence) and data_iterator else None
    rollout = getattr(first, "rollout_data", None)
    if isinstance(rollout, Mapping):
        with training_warnings.harmless():
            _check(rollout)


def _check(rollout: Mapping[str, Any]) -> None:
    import torch

    trained, sampled = rollout.get("log_probs"), rollout.get("rollout_log_probs")
    if not trained or not sampled:
        return
    lengths = [len(values) for values in trained]
    masks = _masks(rollout, lengths)
    if masks is None or lengths != [len(values) for values in sampled]:
        return  # nobody can tell here which values belong together
    differences = (_joined(trained) - _joined(sampled)).abs()
    counted = _joined(masks).to(differences.device).bool() & differences.isfinite()
    differences = differences[counted]
    if not len(differences):
        return
    mean, largest = torch.stack([differences.mean(), differences.max()]).tolist()
    if mean > THRESHOLD:
        training_warnings.report(
            f"rollout_log_probs: the log-probs of the inference engine and of Megatron differ by {mean:.2g} "
            f"nats per token on average and {largest:.2g} at most, on {len(differences)} tokens of this "
            f"rank; up to {THRESHOLD:g} on average is usual. The policy that samples is not the one that is "
            "trained. Look for weights that were sent before they were gathered, another precision, another "
            "temperature, experts that are chosen differently, or a run that samples with older weights by "
            "design",
            setting=_SETTING,
            log=training_warnings.is_first_of_stage(),
        )


def _joined(values: Sequence[Any]) -> Any:
    import torch

    return torch.cat([torch.as_tensor(value).detach().float().reshape(-1) for value in values])


def _masks(rollout: Mapping[str, Any], lengths: list[int]) -> Sequence[Any] | None:
    """Return the loss masks of the tokens whose log-probs there are, or ``None`` if these are not known."""
    import torch

    masks = rollout.get("loss_masks")
    if not masks:
        return [torch.ones(length) for length in lengths]
    if lengths == [len(mask) for mask in masks]:
        return list(masks)
    # Log-probs of a context-parallel rank are of its zigzag share of each response, and masks of all tokens.
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
