"""The closure that a forward step hands to Megatron's schedules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed

from ..errors import InvalidInputError
from .checkpointing import checkpointed
from .policy import PolicyBatch, PolicyOptions, policy_loss

if TYPE_CHECKING:
    from .sequence_layout import SequenceLayout

LossFunc = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]


def make_loss_func(
    tokens: Sequence[torch.Tensor],
    layout: SequenceLayout,
    batch: PolicyBatch,
    options: PolicyOptions | None = None,
    *,
    tp_group: torch.distributed.ProcessGroup | None = None,
    cp_group: torch.distributed.ProcessGroup | None = None,
    temperature: float = 1.0,
    with_entropy: bool = True,
    keep_mask: torch.Tensor | None = None,
    inplace_backward: bool = False,
    recompute: bool = False,
    normalizer: float | None = None,
) -> LossFunc:
    """``loss_func(logits) -> (loss, num_tokens, metrics)`` of one microbatch, for a Megatron forward step::

        def forward_step(data_iterator, model):
            ...
            return model(tokens, position_ids, None), make_loss_func(tokens, layout, batch, options)

    Under context parallelism the log-probs and entropies of the full responses are gathered, so that every
    rank computes the whole loss, and sequence ratios and means are what they are without it; the count is the
    whole one on every rank too, as Megatron's division expects.

    Args:
        tokens: whole samples, ``[total_length]`` each.
        layout: where their responses are in the logits.
        batch: what else the loss needs; full responses, in the order of ``tokens``.
        options: which loss; PPO by default.
        tp_group: over which the vocabulary is split; ``None``: it is whole.
        cp_group: over which the sequences are split; not needed when they are not.
        temperature: of the rollout, by which logits are divided.
        with_entropy: the metric, at the cost of an ``exp``; without it ``entropy_coef`` must be 0.
        keep_mask: of sampling, for the rows of the layout; see :func:`packed_log_probs_and_entropy`.
        inplace_backward: write the gradient into the logits; see :func:`vocab_parallel_log_probs`.
        recompute: do not keep what the loss computes for backward; see :func:`checkpointed`.
        normalizer: ``None`` if ``config.calculate_per_token_loss`` is on. With it off: :func:`mean_count` of
            the step; the loss is divided by it and ``num_tokens`` is 1. Otherwise Megatron would average the
            means of microbatches, and up to 0.14 divide by zero for one that is wholly masked.

    Raises:
        InvalidInputError: batch, layout and options do not fit together. Before any collective.
    """
    options = options or PolicyOptions()
    batch.check_for(options)
    if options.entropy_coef and not with_entropy:
        raise InvalidInputError(f"entropy_coef is {options.entropy_coef}, which needs with_entropy=True")
    divisor = checked_divisor(batch.response_lengths, layout, cp_group, normalizer)

    def loss_func(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        from .packed import packed_log_probs_and_entropy

        log_probs, entropies = packed_log_probs_and_entropy(
            logits,
            tokens,
            layout,
            tp_group=tp_group,
            temperature=temperature,
            with_entropy=with_entropy,
            entropy_grad=options.entropy_coef != 0,
            keep_mask=keep_mask,
            inplace_backward=inplace_backward,
        )
        if entropies is None:
            log_probs = layout.gather_responses(log_probs, cp_group)
        elif layout.cp_size > 1:
            # Together: one collective forward and one in backward.
            pairs = [torch.stack(pair, dim=-1) for pair in zip(log_probs, entropies, strict=True)]
            full = layout.gather_responses(pairs, cp_group)
            log_probs, entropies = ([pair_n2[:, i] for pair_n2 in full] for i in (0, 1))
        loss, count, metrics = policy_loss(log_probs, batch, options, entropies)
        return loss / divisor, count if normalizer is None else torch.ones_like(count), metrics

    return checkpointed(loss_func, enabled=recompute)


def checked_divisor(
    response_lengths: list[int],
    layout: SequenceLayout,
    cp_group: torch.distributed.ProcessGroup | None,
    normalizer: float | None,
) -> float:
    """What a loss that every context-parallel rank computes in full is divided by, before Megatron has it."""
    if response_lengths != list(layout.response_lengths):
        raise InvalidInputError(
            f"batch has responses of the lengths {response_lengths}, layout of "
            f"{list(layout.response_lengths)}; under context parallelism too give the full responses"
        )
    if layout.cp_size > 1 and cp_group is None:
        raise InvalidInputError(f"the layout is for {layout.cp_size} context-parallel ranks; give cp_group")
    if normalizer is not None and not normalizer > 0:
        raise InvalidInputError(f"normalizer is {normalizer}; it must be positive, as mean_count() is")
    return (normalizer or 1.0) * _megatron_multiplies_by(layout.cp_size)


def _megatron_multiplies_by(cp_size: int) -> int:
    """How often a loss that every context-parallel rank computes in full is counted.

    megatron-core 0.12 takes the loss of a context-parallel rank for its share (it multiplies the loss, or
    leaves those ranks out when it adds the counts); later releases treat loss and count alike.
    """
    if cp_size == 1:
        return 1
    try:
        from megatron.core.pipeline_parallel.schedules import forward_step
    except ImportError:
        return 1
    # Both came with this argument.
    return 1 if "vp_stage" in inspect.signature(forward_step).parameters else cp_size
