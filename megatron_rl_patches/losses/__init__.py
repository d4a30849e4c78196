"""Losses of reinforcement learning at the memory floor: log-probabilities, entropy, layouts, policy losses.

On torch alone (Megatron only where its process groups are asked for); usable without any patch. The names
load torch when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .advantages import group_advantages
    from .checkpointing import checkpointed
    from .loss_func import make_loss_func
    from .metrics import average_metrics
    from .normalization import mean_count, token_weights
    from .packed import packed_log_probs_and_entropy
    from .policy import PolicyBatch, PolicyOptions, estimate_kl, policy_loss
    from .sequence_layout import SequenceLayout
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
}

__all__ = [
    "PolicyBatch",
    "PolicyOptions",
    "SequenceLayout",
    "average_metrics",
    "checkpointed",
    "estimate_kl",
    "group_advantages",
    "make_loss_func",
    "mean_count",
    "packed_log_probs_and_entropy",
    "policy_loss",
    "token_weights",
    "vocab_parallel_log_probs",
    "vocab_parallel_log_probs_and_entropy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
