"""Losses from a microbatch's logits, in the form that Megatron's schedules expect from a forward step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed

from ..errors import InvalidInputError
from .checkpointing import checkpointed
from .objectives import distillation, policy
from .objectives.distillation import DistillationBatch, DistillationOptions
from .objectives.policy import PolicyBatch, PolicyOptions
from .objectives.reduction import LossAndCount
from .sequences import SequenceLayout
from .vocab import arguments
from .vocab.arguments import VocabParallelOptions
from .vocab.log_probs import log_probs_and_entropy

LossFunc = Callable[[torch.Tensor], LossAndCount]


def packed_log_probs_and_entropy(
    logits: torch.Tensor,
    tokens: Sequence[torch.Tensor],
    layout: SequenceLayout,
    *,
    with_entropy: bool = True,
    entropy_grad: bool = True,
    **options: Any,
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Return log-probs and entropies of the response tokens of this CP rank, one tensor per sample.

    Other rows are not read; their gradient is zero. One all-gather runs over ``tp_group``, in forward.

    Args:
        logits: as the model returns them on this CP rank: ``[1, rows, vocab / tp]`` or ``[rows, vocab / tp]``
            (packed), ``[batch, seq, vocab / tp]`` (padded).
        tokens: whole samples, ``[total_length]`` each, the same on every rank.
        layout: layout of this microbatch on this CP rank.
        with_entropy: compute entropies too.
        entropy_grad: let the entropies require grad; ``False`` saves time in backward.
        **options: those of :func:`vocab_parallel_log_probs`; its rows are ``layout.response_rows``.

    Returns:
        The log-probs, and the entropies in nats or ``None``: for sample ``i`` a tensor
        ``[layout.local_lengths[i]]`` in float32 (float64 for float64 logits).

    Raises:
        InvalidInputError: logits, tokens and layout are not of the same microbatch, or not on one device; or
            an id is outside of the vocabulary, which every CP rank refuses, whichever of them scores it.
    """
    arguments.check_instance("layout", layout, SequenceLayout)
    keep_mask = options.pop("keep_mask", None)
    how = VocabParallelOptions(with_entropy=with_entropy, entropy_grad=entropy_grad, **options)
    rows_nv, targets, split = layout.rows_of(logits), layout.targets(tokens), layout.split_responses
    log_probs, entropies = _scored(rows_nv, targets, layout, keep_mask, how)
    return split(log_probs), None if entropies is None else split(entropies)


def _scored(
    rows_nv: torch.Tensor,
    targets: torch.Tensor,
    layout: SequenceLayout,
    keep_mask: torch.Tensor | None,
    how: VocabParallelOptions,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probs and perhaps entropies of this CP rank's tokens; ``targets`` are those of all ranks."""
    if layout.cp_size > 1:
        # A rank that refused its own ids alone would leave the others waiting for its values.
        size = how.num_ids(rows_nv.shape[1])
        arguments.check_ids("targets", targets, size, how.ignore_index, "to ignore a row")
    mine = targets.index_select(0, layout.response_index)
    return log_probs_and_entropy(rows_nv, mine, layout.response_slices, keep_mask, how)


def make_loss_func(
    tokens: Sequence[torch.Tensor],
    layout: SequenceLayout,
    batch: PolicyBatch,
    options: PolicyOptions | None = None,
    *,
    tp_group: torch.distributed.ProcessGroup | None = None,
    cp_group: torch.distributed.ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = True,
    keep_mask: torch.Tensor | None = None,
    inplace_backward: bool = False,
    recompute: bool = False,
    normalizer: float | None = None,
) -> LossFunc:
    """Return the function ``logits -> (loss, num_tokens, metrics)`` that a Megatron forward step returns::

        def forward_step(data_iterator, model):
            ...
            return model(tokens, position_ids, None), make_loss_func(tokens, layout, batch, options)

    The loss is :func:`policy_loss`. Under context parallelism log-probs and entropies are gathered over
    ``cp_group``, so that every rank computes the whole loss and the whole count.

    Args:
        tokens: whole samples, prompt and response, int64 ``[total_length]`` each.
        layout: where their responses stand in the logits.
        batch: advantages, masks and other log-probs of the full responses, in the order of ``tokens``.
        options: which loss to compute; PPO by default.
        tp_group: see :func:`vocab_parallel_log_probs`, as for ``temperature``, ``vocab_size``, ``keep_mask``
            and ``inplace_backward``. Log-probs of the batch that are known to be of another size are refused.
        cp_group: process group over which the sequences are split; ``None`` if they are whole.
        with_entropy: compute the entropy, which costs one more ``exp`` per logit; ``entropy_coef`` needs it.
        recompute: compute the loss again in backward instead of keeping tensors; see :func:`checkpointed`.
        normalizer: ``None`` if ``config.calculate_per_token_loss`` is on. If it is off, pass
            :func:`mean_count` of the step: the loss is divided by it, and ``num_tokens`` is 1.

    Raises:
        InvalidInputError: batch, layout and options do not fit together; before any collective.
    """
    options = PolicyOptions() if options is None else options
    policy.check_fit(batch, options)
    entropy = {"with_entropy": with_entropy, "entropy_grad": options.entropy_coef != 0}
    how = VocabParallelOptions(tp_group, temperature, inplace_backward, vocab_size=vocab_size, **entropy)
    if options.entropy_coef and not with_entropy:
        raise InvalidInputError(f"entropy_coef is {options.entropy_coef}, which needs with_entropy=True")
    divisor = _checked_divisor(batch.response_lengths, layout, cp_group, normalizer)
    masks, advantages = batch.loss_masks[0], batch.advantages[0]
    arguments.check_one_device(layout=layout.response_rows, loss_masks=masks, advantages=advantages)
    targets = layout.targets(tokens)
    others = [batch.old_log_probs, batch.ref_log_probs, batch.rollout_log_probs]

    def loss_func(logits: torch.Tensor) -> LossAndCount:
        rows_nv = layout.rows_of(logits)
        arguments.in_common(others, vocab_size=how.num_ids(rows_nv.shape[1]))
        log_probs_n, entropies_n = _scored(rows_nv, targets, layout, keep_mask, how)
        if layout.cp_size > 1:
            # One tensor for both, so that there is one collective in forward and one in backward.
            values = [log_probs_n] if entropies_n is None else [log_probs_n, entropies_n]
            log_probs_n, *more = layout.gathered(torch.stack(values, 1), cp_group).unbind(1)
            entropies_n = more[0] if more else None
        loss, count, metrics = policy.loss_of_tokens(log_probs_n, batch, options, entropies_n)
        return loss / divisor, count if normalizer is None else torch.ones_like(count), metrics

    return checkpointed(loss_func, enabled=recompute)


def make_distillation_loss_func(
    layout: SequenceLayout,
    batch: DistillationBatch,
    options: DistillationOptions | None = None,
    *,
    tp_group: torch.distributed.ProcessGroup | None = None,
    cp_group: torch.distributed.ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    inplace_backward: bool = False,
    recompute: bool = False,
    normalizer: float | None = None,
) -> LossFunc:
    """Return the function ``logits -> (loss, num_tokens, metrics)`` that a Megatron forward step returns.

    The student is scored at the teachers' ids. Under context parallelism three numbers per token are gathered
    over ``cp_group``. Arguments and errors are those of :func:`make_loss_func`, except for:

    Args:
        batch: teachers and masks of the full responses.
        options: which loss to compute; the reverse KL by default.
        inplace_backward: with full distributions it has an effect where all tokens have the same teacher.
    """
    options = DistillationOptions() if options is None else options
    distillation.check_fit(batch, options)
    how: dict[str, Any] = {"tp_group": tp_group, "temperature": temperature, "vocab_size": vocab_size}
    VocabParallelOptions(**how)  # refuses bad ones now
    divisor = _checked_divisor(batch.response_lengths, layout, cp_group, normalizer)
    how["inplace_backward"] = inplace_backward
    compare = distillation.comparison(layout.response_rows, layout.response_index, batch, options, how)

    def loss_func(logits: torch.Tensor) -> LossAndCount:
        values_n3 = layout.gathered(compare(layout.rows_of(logits)), cp_group)
        loss, count, metrics = distillation.summed(values_n3, batch, options)
        return loss / divisor, count if normalizer is None else torch.ones_like(count), metrics

    return checkpointed(loss_func, enabled=recompute)


def _checked_divisor(
    response_lengths: list[int],
    layout: SequenceLayout,
    cp_group: torch.distributed.ProcessGroup | None,
    normalizer: float | None,
) -> float:
    """Check the arguments; return the divisor of a loss that every CP rank computes in full."""
    arguments.check_instance("layout", layout, SequenceLayout)
    if response_lengths != list(layout.response_lengths):
        lengths = f"{response_lengths}, layout of {list(layout.response_lengths)}"
        what_to_pass = "pass the full responses, under context parallelism too"
        raise InvalidInputError(f"batch has responses of the lengths {lengths}; {what_to_pass}")
    layout.check_group(cp_group)
    return 1.0 if normalizer is None else arguments.check_positive("normalizer", normalizer)
