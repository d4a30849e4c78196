"""Parts of messages."""

from __future__ import annotations

from collections.abc import Collection


def listed(items: Collection[object], count: int = 10) -> str:
    """Join the first items with commas, and say how many more there are: ``a, b and 7 more``."""
    shown = [str(item) for item, _ in zip(items, range(count), strict=False)]
    more = len(items) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def one_line(error: BaseException) -> str:
    """Return type and first line of an exception; the whole is chained to the error that quotes it."""
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
