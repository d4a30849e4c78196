"""Which TransformerEngine the stand-in stands for: Megatron asks for it, and attributes depend on it."""

from __future__ import annotations

DEFAULT = "2.9.0"
current = DEFAULT


def is_at_least(*release: int) -> bool:
    """Return whether the version is the release or a later one."""
    return tuple(map(int, current.split(".")[: len(release)])) >= release
