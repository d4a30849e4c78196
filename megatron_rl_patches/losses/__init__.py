"""Losses of reinforcement learning on logits that may be split over ranks, with little memory.

Everything works with torch alone and without any patch.
"""

from .checkpointing import checkpointed
from .loss_functions import make_distillation_loss_func, make_loss_func, packed_log_probs_and_entropy
from .objectives.distillation import DistillationBatch, DistillationOptions, distillation_loss
from .objectives.distributions import FullDistribution, TopKDistribution, mix_teachers, route_teachers
from .objectives.finite import estimate_kl
from .objectives.policy import PolicyBatch, PolicyOptions, group_advantages, group_log_probs, policy_loss
from .objectives.reduction import average_metrics, mean_count, token_weights
from .objectives.topk_divergences import (
    forward_kl,
    generalized_kl,
    importance_weighted_reverse_kl,
    jensen_shannon,
    opd_advantages,
    reverse_kl,
    vocab_parallel_topk,
)
from .output_layer import OutputHead
from .sequences import SequenceLayout
from .vocab.at_ids import vocab_parallel_log_probs_at
from .vocab.deferred import DeferredLogits, deferred_logits
from .vocab.full_divergence import full_vocabulary_divergence
from .vocab.log_probs import vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy

__all__ = [
    "DeferredLogits",
    "DistillationBatch",
    "DistillationOptions",
    "FullDistribution",
    "OutputHead",
    "PolicyBatch",
    "PolicyOptions",
    "SequenceLayout",
    "TopKDistribution",
    "average_metrics",
    "checkpointed",
    "deferred_logits",
    "distillation_loss",
    "estimate_kl",
    "forward_kl",
    "full_vocabulary_divergence",
    "generalized_kl",
    "group_advantages",
    "group_log_probs",
    "importance_weighted_reverse_kl",
    "jensen_shannon",
    "make_distillation_loss_func",
    "make_loss_func",
    "mean_count",
    "mix_teachers",
    "opd_advantages",
    "packed_log_probs_and_entropy",
    "policy_loss",
    "reverse_kl",
    "route_teachers",
    "token_weights",
    "vocab_parallel_log_probs",
    "vocab_parallel_log_probs_and_entropy",
    "vocab_parallel_log_probs_at",
    "vocab_parallel_topk",
]
