"""Losses of reinforcement learning at the memory floor: log-probabilities, layouts, policies, distillation.

On torch alone (Megatron only where its process groups are asked for); usable without any patch. The names
load torch when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .advantages import group_advantages
    from .checkpointing import checkpointed
    from .distillation import (
        DistillationBatch,
        DistillationOptions,
        distillation_loss,
        make_distillation_loss_func,
    )
    from .divergences import (
        forward_kl,
        generalised_kl,
        importance_weighted_reverse_kl,
        jensen_shannon,
        opd_advantages,
        reverse_kl,
    )
    from .loss_func import make_loss_func
    from .metrics import average_metrics
    from .normalization import mean_count, token_weights
    from .packed import packed_log_probs_and_entropy
    from .policy import PolicyBatch, PolicyOptions, estimate_kl, policy_loss
    from .sequence_layout import SequenceLayout
    from .teachers import mix_teachers, route_teachers
    from .topk import vocab_parallel_log_probs_at, vocab_parallel_topk
    from .topk_distribution import TopKDistribution, log1mexp
    from .vocab_parallel import vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy

_HOME_OF = {
    "vocab_parallel_log_probs": ".vocab_parallel",
    "vocab_parallel_log_probs_and_entropy": ".vocab_parallel",
    "packed_log_probs_and_entropy": ".packed",
    "SequenceLayout": ".sequence_layout",
    "checkpointed": ".checkpointing",
    "PolicyBatch": ".policy",
    "PolicyOptions": ".policy",
    "policy_loss": ".policy",
    "estimate_kl": ".policy",
    "group_advantages": ".advantages",
    "token_weights": ".normalization",
    "mean_count": ".normalization",
    "average_metrics": ".metrics",
    "make_loss_func": ".loss_func",
    "vocab_parallel_topk": ".topk",
    "vocab_parallel_log_probs_at": ".topk",
    "TopKDistribution": ".topk_distribution",
    "log1mexp": ".topk_distribution",
    "mix_teachers": ".teachers",
    "route_teachers": ".teachers",
    "reverse_kl": ".divergences",
    "forward_kl": ".divergences",
    "jensen_shannon": ".divergences",
    "generalised_kl": ".divergences",
    "importance_weighted_reverse_kl": ".divergences",
    "opd_advantages": ".divergences",
    "DistillationBatch": ".distillation",
    "DistillationOptions": ".distillation",
    "distillation_loss": ".distillation",
    "make_distillation_loss_func": ".distillation",
}

__all__ = [
    "DistillationBatch",
    "DistillationOptions",
    "PolicyBatch",
    "PolicyOptions",
    "SequenceLayout",
    "TopKDistribution",
    "average_metrics",
    "checkpointed",
    "distillation_loss",
    "estimate_kl",
    "forward_kl",
    "generalised_kl",
    "group_advantages",
    "importance_weighted_reverse_kl",
    "jensen_shannon",
    "log1mexp",
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


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
