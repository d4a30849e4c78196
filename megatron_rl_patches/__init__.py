"""Megatron-core, made fit for reinforcement learning: patches that are put in place without a fork.

Importing this package loads neither torch nor megatron. ``apply()`` puts the patches in place, before or
after the host frameworks are imported; the environment variable ``MEGATRON_RL_PATCHES=1`` does the same
with no code change.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.api import applied, apply, available, revert, status
    from .engine.ranks import verify_ranks
    from .engine.spec import Patch
    from .errors import MegatronRLPatchesError, PatchError
    from .settings import Settings

__version__ = "0.1.0"

_HOME_OF = {
    "apply": ".engine.api",
    "applied": ".engine.api",
    "available": ".engine.api",
    "revert": ".engine.api",
    "status": ".engine.api",
    "verify_ranks": ".engine.ranks",
    "Patch": ".engine.spec",
    "Settings": ".settings",
    "MegatronRLPatchesError": ".errors",
    "PatchError": ".errors",
}

__all__ = [
    "MegatronRLPatchesError",
    "Patch",
    "PatchError",
    "Settings",
    "applied",
    "apply",
    "available",
    "revert",
    "status",
    "verify_ranks",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
