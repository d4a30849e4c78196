"""Distillation as a custom loss of slime, OpenClaw-RL and miles; no patch is needed for it. ::

    --loss-type custom_loss
    --custom-loss-function-path megatron_rl_patches.frameworks.distillation_loss.opd_loss

For the response tokens of this context-parallel rank, as these frameworks lay them out (zigzag), a batch has
lists with one value per sample, on any device. The patch ``distillation`` adds the first two. Without these a
batch has one teacher, by the other three, as OpenClaw-RL passes it.

============================  ===========================================================================
``opd_teachers``              a tuple of distributions: of a mixture one, else one for each teacher
``opd_old``                   the distribution of the policy that sampled; not always needed
``teacher_topk_indices``      int64 ``[n, k]``, token ids
``teacher_topk_log_probs``    float ``[n, k]``, of the teacher at these ids
``teacher_topk_tail``         float ``[n]``, log-probability of all other ids; optional
============================  ===========================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..losses.objectives.distillation import DistillationBatch, DistillationOptions, check_fit, comparison
from ..losses.objectives.distributions import TopKDistribution
from ..losses.sequences import SequenceLayout
from . import microbatch_layout
from .distillation_arguments import refuse_conflicts

#: Keys that the patch adds to a batch.
KEYS = TEACHERS, OLD = "opd_teachers", "opd_old"
_IDS, _LOG_PROBS, _TAIL = "teacher_topk_indices", "teacher_topk_log_probs", "teacher_topk_tail"

# The smallest tail that float32 can tell from 0, if it is one minus the sum of the stored probabilities.
_SMALLEST_TAIL = 1e-7
# Stored probabilities may be rounded to 16 bits, and so add up to a little more than one.
LARGEST_SUM = 1.05


def opd_loss(
    args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the divergence between the student and its teachers.

    Args:
        args: of the framework. Read are ``rollout_temperature``, ``qkv_format``, ``opd_divergence`` and
            ``opd_beta`` (see :class:`.DistillationOptions`; default ``"reverse_kl"`` and 0.5), and of several
            teachers ``opd_teacher_weights``. A file given with ``--custom-config-path`` can set them.
        batch: a microbatch of the framework, with the keys above.
        logits: ``[1, T, V / tp]`` (``thd``) or ``[B, S, V / tp]`` (``bshd``), of this rank.
        sum_of_sample_mean: the framework's reduction of values per local response token.

    Returns:
        The loss with gradient, and detached scalars, as the framework's own losses: ``loss``, and for a top-k
        the probability of the tails, ``opd_student_tail`` and ``opd_teacher_tail``.

    Raises:
        InvalidInputError: all-gather context parallelism, an entropy bonus, a batch without a teacher, or of
            other lengths. Before any collective.
    """
    refuse_conflicts(args, "allgather_cp", "entropy_coef")
    layout, tp_group = layout_of(args, batch, logits)
    local = _local_batch(batch, layout, logits.device)
    weights = getattr(args, "opd_teacher_weights", ()) if len(local.teachers) > 1 else ()
    options = DistillationOptions(
        divergence=getattr(args, "opd_divergence", "reverse_kl"),
        beta=getattr(args, "opd_beta", 0.5),
        teacher_weights=tuple(weights) or None,
    )
    if local.old is None and options.measure.needs_old:
        raise InvalidInputError(
            f"opd_divergence is {options.divergence!r}, which needs {OLD} in the batch: apply "
            "the patch distillation, which adds it, or choose another divergence"
        )
    check_fit(local, options)
    index = torch.arange(len(layout.response_rows), device=logits.device)
    how = {"tp_group": tp_group, "temperature": temperature_of(args)}
    values = comparison(layout.response_rows, index, local, options, how)(layout.rows_of(logits))
    names = ("loss", "opd_student_tail", "opd_teacher_tail")
    metrics = dict(zip(names, map(sum_of_sample_mean, values.unbind(1)), strict=False))
    return metrics["loss"], {name: value.detach().clone() for name, value in metrics.items()}


def layout_of(
    args: Any, batch: Mapping[str, Any], logits: Tensor
) -> tuple[SequenceLayout, torch.distributed.ProcessGroup | None]:
    """Return the layout of the batch in the logits of this rank, and the tensor-parallel group."""
    groups = microbatch_layout.groups_of()
    layout = microbatch_layout.layout_of(args, batch, groups, logits.shape[1], logits.device)
    return layout, groups.tp_group


def temperature_of(args: Any) -> float:
    """Return the temperature of the rollout, by which the framework divides logits."""
    return float(getattr(args, "rollout_temperature", 1.0))


def _local_batch(batch: Mapping[str, Any], layout: SequenceLayout, device: torch.device) -> DistillationBatch:
    """Return teachers, old policy and masks of the tokens of this context-parallel rank."""
    masks = layout.local_parts([mask.to(device) for mask in batch["loss_masks"]])
    if batch.get(TEACHERS):
        return DistillationBatch(list(zip(*batch[TEACHERS], strict=True)), masks, batch.get(OLD) or None)
    teacher, is_known = _stored_topk(batch, layout.local_lengths, device)
    known = zip(masks, layout.split_responses(is_known), strict=True)
    return DistillationBatch([teacher.split(layout.local_lengths)], [mask * is_in for mask, is_in in known])


def _stored_topk(
    batch: Mapping[str, Any], lengths: Sequence[int], device: torch.device
) -> tuple[TopKDistribution, Tensor]:
    """Return the distributions at all tokens of this rank, and a mask ``[n]`` of the tokens that have one.

    For a token that its teacher did not score, OpenClaw-RL stores probabilities of one at the ids 0 to k - 1,
    and no tail. Such a token has no distribution. With k = 1 a teacher that is certain of id 0 looks the
    same, and counts as not having scored the token.
    """
    if not batch.get(_LOG_PROBS) or not batch.get(_IDS):
        raise InvalidInputError(
            f"the batch has neither {TEACHERS} nor {_IDS} and {_LOG_PROBS}. OpenClaw-RL passes these with "
            "--distill-topk; the patch distillation passes the former, where it is selected in the workers' "
            "environment too"
        )
    indices = _local(batch, _IDS, lengths, device).long()
    log_probs = _local(batch, _LOG_PROBS, lengths, device).float()
    tail = _local(batch, _TAIL, lengths, device).float() if batch.get(_TAIL) else None
    return with_tail(indices, log_probs, tail)


def with_tail(
    indices: Tensor, log_probs: Tensor, tail: Tensor | None = None
) -> tuple[TopKDistribution, Tensor]:
    """Return distributions from stored log-probabilities ``[n, k]``, and a mask ``[n]`` of rows that are one.

    ``tail`` is the log-probability ``[n]`` of all other ids; by default of what the k leave, at least 1e-7.
    """
    log_sum = log_probs.logsumexp(1)
    is_known = log_sum.exp() <= LARGEST_SUM
    if tail is None:
        # In float64, where 1 - exp(x) has correct digits for any x in float32.
        tail = (-log_sum.clamp(max=-_SMALLEST_TAIL).double().expm1()).log().to(log_probs.dtype)
        if indices.shape[1] == 1:  # a certain id 0 is padding
            is_known &= (indices[:, 0] != 0) | (log_sum != 0)
    return TopKDistribution(indices, log_probs, tail), is_known


def _local(batch: Mapping[str, Any], key: str, lengths: Sequence[int], device: torch.device) -> Tensor:
    values = [torch.as_tensor(value, device=device) for value in batch[key]]
    if (stored_lengths := list(map(len, values))) != list(lengths):
        raise InvalidInputError(
            f"{key} are of {stored_lengths} tokens, but the responses of this rank have "
            f"{list(lengths)}: cut them as the framework cuts its log-probs (zigzag)"
        )
    return torch.cat(values)


async def zero_reward(args: Any, sample: Any, **unused: Any) -> Any:
    """Return a reward of 0 for each sample: for ``--custom-rm-path``, where only teachers matter."""
    return [0.0] * len(sample) if isinstance(sample, list) else 0.0


def placeholder_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Set advantages and returns to zeros, for ``--custom-advantage-function-path``; the loss reads neither.

    If the framework lacks that option, or to save the forward pass that advantages need, pass
    ``--disable-compute-advantages-and-returns`` instead.
    """
    zeros = [torch.zeros_like(kl) for kl in rollout_data["kl"]]
    rollout_data["advantages"], rollout_data["returns"] = zeros, list(zeros)
