"""The environment of processes that tests start."""

from __future__ import annotations

import os


def without_ours() -> dict[str, str]:
    """Return the environment without the variables of this package."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_RL_PATCHES")}
