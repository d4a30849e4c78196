"""Make Megatron's training state re-enterable, by plain functions on model chunks that need no patch."""

from .forward_pre_hooks import preserved_hooks
from .guard import TrainGuard, reentrant_train
from .optimizer_step import OptimizerStep
from .self_ratio import RatioReport, SelfRatio

__all__ = ["OptimizerStep", "RatioReport", "SelfRatio", "TrainGuard", "preserved_hooks", "reentrant_train"]
