"""Megatron-core, made fit for reinforcement learning: patches that are put in place without a fork.

Importing this package loads neither torch nor megatron. ``apply()`` puts the patches in place, before or
after the frameworks are imported; the environment variable ``MEGATRON_RL_PATCHES=1`` does the same
with no code change. PYTEST_DONT_REWRITE: pytest, which loads its plugin, would warn of an earlier import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .common.lazy import lazy_names

if TYPE_CHECKING:
    from .engine.api import applied as applied
    from .engine.api import apply as apply
    from .engine.api import available as available
    from .engine.api import revert as revert
    from .engine.api import status as status
    from .engine.api import verify_ranks as verify_ranks
    from .engine.call import Call as Call
    from .engine.patch import Patch as Patch
    from .engine.patch import Site as Site
    from .engine.settings import Settings as Settings
    from .engine.statuses import SiteStatus as SiteStatus
    from .engine.target_source import TargetSource as TargetSource
    from .errors import MegatronRLPatchesError as MegatronRLPatchesError
    from .errors import PatchError as PatchError

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".engine.api": ["applied", "apply", "available", "revert", "status", "verify_ranks"],
        ".engine.call": ["Call"],
        ".engine.statuses": ["SiteStatus"],
        ".engine.patch": ["Patch", "Site"],
        ".engine.settings": ["Settings"],
        ".engine.target_source": ["TargetSource"],
        ".errors": ["MegatronRLPatchesError", "PatchError"],
    },
)
