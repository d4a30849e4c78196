"""Models that only score: built, loaded, swapped and run without DDP, gradients or optimizer.

On megatron-core alone; usable without any patch. The names load torch and Megatron when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .builder import build_inference_model
    from .checkpoint import load_inference_checkpoint
    from .estimate import estimate_memory
    from .memory import memory_report
    from .scoring import forward_log_probs, forward_topk
    from .teachers import TeacherPool

_HOME_OF = {
    "build_inference_model": ".builder",
    "load_inference_checkpoint": ".checkpoint",
    "estimate_memory": ".estimate",
    "memory_report": ".memory",
    "forward_log_probs": ".scoring",
    "forward_topk": ".scoring",
    "TeacherPool": ".teachers",
}

__all__ = [
    "TeacherPool",
    "build_inference_model",
    "estimate_memory",
    "forward_log_probs",
    "forward_topk",
    "load_inference_checkpoint",
    "memory_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
