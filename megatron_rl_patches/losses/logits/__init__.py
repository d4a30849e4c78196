"""What is computed from logits; the operations on deferred logits are complete once they are imported."""

from . import deferred_operations

__all__ = ["deferred_operations"]
