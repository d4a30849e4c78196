"""Logits that are computed in tiles; the operations on them are complete once this is imported."""

from . import operations

__all__ = ["operations"]
