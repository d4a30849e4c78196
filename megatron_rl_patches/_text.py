"""Lists in messages."""

from __future__ import annotations

from collections.abc import Collection


def first(items: Collection[object], count: int = 10) -> str:
    """Join the first items with commas, and say how many more there are: ``a, b and 7 more``."""
    shown = [str(item) for item, _ in zip(items, range(count), strict=False)]
    more = len(items) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
