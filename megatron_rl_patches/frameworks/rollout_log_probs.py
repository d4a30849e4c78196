"""Log-probs of a rollout's tokens, as the inference engine and as Megatron computed them.

torch is imported only where it is needed, since the loops of a test may run without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..common.messages import Message
from ..reentry import training_warnings

#: A mean difference above this, in nats per token, is reported. bfloat16 on both sides gives 0.01 to 0.05.
_MAX_DIFFERENCE = 0.1
_DIFFERENT_POLICIES = Message(
    "rollout_log_probs: the log-probs of the inference engine and of Megatron differ by {mean:.2g} nats per "
    "token on average and {largest:.2g} at most, on {tokens} tokens of this rank",
    f"Above {_MAX_DIFFERENCE:g} on average, the policy that samples is not the policy that is trained.",
    "Compare precision, temperature and expert routing of both, and gather weights before you send them. If "
    "the run samples with older weights by design, ignore it.",
)


def check_rollout_log_probs(data_iterator: Any) -> None:
    """Report, once per process, log-probs of the inference engine that differ from Megatron's.

    slime, vime and miles have both in the data of a rollout where they compute the policy's log-probs before
    training: ``rollout_log_probs`` as sampled, and ``log_probs`` of Megatron. With one step per rollout they
    take those of the loss, and with ``--use-rollout-logprobs`` they need none: then nothing is compared here,
    and slime's own metric ``train_rollout_logprob_abs_diff`` tells. verl has a metric, too.

    Args:
        data_iterator: what ``train()`` of a framework takes under this name: iterators, each with its
            ``rollout_data``. Iterators without such data are not looked at.
    """
    if "rollout_log_probs" in training_warnings.messages:
        return
    first = data_iterator[0] if isinstance(data_iterator, Sequence) and data_iterator else None
    rollout = getattr(first, "rollout_data", None)
    if isinstance(rollout, Mapping):
        with training_warnings.harmless():
            _compare_log_probs(rollout)


def _compare_log_probs(rollout: Mapping[str, Any]) -> None:
    import torch

    def joined(values: Sequence[Any]) -> Any:
        return torch.cat([torch.as_tensor(value).detach().float().reshape(-1) for value in values])

    trained, sampled = rollout.get("log_probs"), rollout.get("rollout_log_probs")
    if not trained or not sampled:
        return
    lengths = [len(values) for values in trained]
    masks = rollout.get("loss_masks") or [torch.ones(length) for length in lengths]
    if lengths != [len(mask) for mask in masks]:
        masks = _local_masks(rollout)
    if not lengths == [len(mask) for mask in masks] == [len(values) for values in sampled]:
        return  # nobody can tell here which values belong together
    differences = (joined(trained) - joined(sampled)).abs()
    differences = differences[joined(masks).to(differences.device).bool() & differences.isfinite()]
    if not len(differences):
        return
    mean, largest = torch.stack([differences.mean(), differences.max()]).tolist()
    if mean > _MAX_DIFFERENCE:
        training_warnings.report(
            "rollout_log_probs", _DIFFERENT_POLICIES, mean=mean, largest=largest, tokens=len(differences)
        )


def _local_masks(rollout: Mapping[str, Any]) -> Sequence[Any]:
    """Return the loss masks of this context-parallel rank, which has a zigzag share of each response."""
    import torch
    from megatron.core import parallel_state

    from ..losses.sequences.layout import SequenceLayout

    layout = SequenceLayout.build(
        rollout["total_lengths"],
        rollout["response_lengths"],
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
    )
    return layout.local_parts([torch.as_tensor(mask).cpu() for mask in rollout["loss_masks"]])
