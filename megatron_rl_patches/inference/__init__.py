"""Models that only score: built, loaded, swapped and run without DDP, gradients or optimizer.

The names load torch and megatron-core when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy import lazy_names

if TYPE_CHECKING:
    from .checkpoints.load import load_inference_checkpoint as load_inference_checkpoint
    from .memory.estimate import MemoryEstimate as MemoryEstimate
    from .memory.estimate import OptimizerSettings as OptimizerSettings
    from .memory.estimate import estimate_memory as estimate_memory
    from .memory.parameters import GPTArguments as GPTArguments
    from .memory.report import MemoryPhases as MemoryPhases
    from .memory.report import MemoryReport as MemoryReport
    from .memory.report import memory_report as memory_report
    from .models.model import build_inference_model as build_inference_model
    from .scoring.forward import Scores as Scores
    from .scoring.forward import forward_hidden_states as forward_hidden_states
    from .scoring.forward import forward_log_probs as forward_log_probs
    from .scoring.forward import forward_topk as forward_topk
    from .scoring.forward import forward_values as forward_values
    from .scoring.forward import output_head as output_head
    from .teachers import TeacherPool as TeacherPool

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".models.model": ["build_inference_model"],
        ".checkpoints.load": ["load_inference_checkpoint"],
        ".memory.estimate": ["MemoryEstimate", "OptimizerSettings", "estimate_memory"],
        ".memory.parameters": ["GPTArguments"],
        ".memory.report": ["MemoryPhases", "MemoryReport", "memory_report"],
        ".scoring.forward": [
            *("Scores", "forward_hidden_states", "forward_log_probs", "forward_topk", "forward_values"),
            "output_head",
        ],
        ".teachers": ["TeacherPool"],
    },
)
