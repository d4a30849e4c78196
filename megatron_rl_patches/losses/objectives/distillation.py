"""On-policy distillation: losses that draw the policy in training towards one or several teachers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import InvalidInputError
from .comparison import Tokens, per_token
from .distillation_batch import DistillationBatch, DistillationOptions
from .policy import check_lengths
from .reduction import LossAndCount, metrics_of, token_weights


def distillation_loss(
    log_probs: Sequence[Tensor],
    tail_log_probs: Sequence[Tensor],
    batch: DistillationBatch,
    options: DistillationOptions,
) -> LossAndCount:
    """Return the distillation loss of a microbatch as a sum, the count to divide it by, and metrics.

    Args:
        log_probs: the student's log-probs at the batch's indices, ``[response_length, k]`` per response.
        tail_log_probs: the student's log-probs of all other ids together, ``[response_length]`` per response.
        batch: teachers and masks of the same responses.
        options: which loss to compute.

    Returns:
        ``(loss, num_tokens, metrics)`` as :func:`policy_loss` does. The metrics are ``loss`` in its own
        normalization, and per token ``divergence`` (nats), ``student_tail`` and ``teacher_tail``, which are
        the probabilities of the tails.

    Raises:
        InvalidInputError: shapes differ from the batch's, or the options need something that is missing.
    """
    batch.check_for(options)
    if batch.is_full:
        raise InvalidInputError("the teachers are full distributions: use make_distillation_loss_func")
    lengths = batch.response_lengths
    check_lengths("tail_log_probs", tail_log_probs, lengths)
    check_lengths("log_probs", [log_probs_lk[..., 0] for log_probs_lk in log_probs], lengths)
    log_probs_nk, tail_n = torch.cat(list(log_probs)), torch.cat(list(tail_log_probs))
    tokens = Tokens.of(batch, tail_n.device, slice(None))
    return summed(per_token(log_probs_nk, tail_n, tokens, options), batch, options)


def summed(values_n3: Tensor, batch: DistillationBatch, options: DistillationOptions) -> LossAndCount:
    """Return loss, count and metrics from divergence, and perhaps tails, of the full responses."""
    divergence_n, *tails = values_n3.unbind(1)
    masks = [mask.to(values_n3.device) for mask in batch.loss_masks]
    weights_n, count = token_weights(masks, options.normalization, options.constant_length, values_n3.dtype)
    averages = {
        "divergence": divergence_n,
        **dict(zip(("student_tail", "teacher_tail"), tails, strict=False)),
    }
    metrics = metrics_of({"loss": divergence_n}, averages, weights_n, count)
    return (weights_n * divergence_n).sum(), count, metrics
