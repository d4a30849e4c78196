"""Which TransformerEngine the stand-in stands for: Megatron asks for it, and attributes depend on it."""

from __future__ import annotations

from packaging.version import Version

DEFAULT = "2.9.0"
current = DEFAULT


def is_at_least(release: str) -> bool:
    """Return whether the version is the release or a later one."""
    return Version(current) >= Version(release)
