"""Megatron training state made re-enterable. Plain functions on model chunks; usable without any patch."""

from .forward_pre_hooks import preserved_hooks
from .guard import reentrant_train

__all__ = ["preserved_hooks", "reentrant_train"]
