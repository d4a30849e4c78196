"""Which TransformerEngine the stand-in stands for: Megatron asks for it, and attributes depend on it."""

from __future__ import annotations

DEFAULT = "2.9.0"
_current = DEFAULT


def current() -> str:
    """Return the version."""
    return _current


def use(version: str) -> None:
    """Stand for another version from now on."""
    global _current
    _current = version


def is_at_least(*release: int) -> bool:
    """Return whether the version is the release or a later one."""
    return tuple(map(int, _current.split(".")[: len(release)])) >= release
