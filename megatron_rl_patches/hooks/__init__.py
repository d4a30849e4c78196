"""Functions for the places where frameworks call code of their users: a line of configuration, no variable.

=====================  ==========================================================================
framework              line
=====================  ==========================================================================
slime, vime, miles     ``--custom-megatron-init-path megatron_rl_patches.hooks.on_megatron_init``
Megatron-Bridge        ``cfg.model.register_pre_wrap_hook(megatron_rl_patches.hooks.pre_wrap)``
verl                   ``actor_rollout_ref.model.external_lib=megatron_rl_patches.hooks.verl``
=====================  ==========================================================================

Each applies the default set of patches, or what ``MEGATRON_RL_PATCHES`` selects where it is set.
NeMo-RL has no such place, but its configuration sets variables of the workers:
``policy.megatron_cfg.env_vars.MEGATRON_RL_PATCHES=default``.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["on_megatron_init", "pre_wrap"]


def on_megatron_init(args: Any = None) -> None:
    """Apply the patches in a worker of slime, vime, OpenClaw-RL or miles, and say on rank 0 which are there.

    The frameworks call it after Megatron is initialized and before the model is built. By then they have
    copied functions from module to module, and the copies are patched too. ``distillation`` also changes the
    command line, which is parsed in another process, so it needs the variable. ``args`` are not used.

    Raises:
        PatchError: only with ``MEGATRON_RL_PATCHES_STRICT=1``, for a patch that cannot take effect.
    """
    from ..engine.api import status
    from ..engine.installer import installer

    switch_on()
    installer.announcer.once(status())


def pre_wrap(model: list[Any]) -> list[Any]:
    """Do the same in a program on Megatron-Bridge, and return the list of model chunks unchanged.

    Megatron-Bridge calls it when the model has been built, and before DDP is put around it. That is early
    enough for all patches but ``inference-only``, which decides about DDP before. It raises the same errors.
    """
    on_megatron_init()
    return model


def switch_on() -> None:
    """Apply the default set of patches, or what the variable selects where it is set."""
    # Imported here, since verl loads a module of this package in every process, wanted or not.
    import _megatron_rl_patches_startup as startup

    from ..engine.api import activate_from_environment
    from ..engine.settings import VARIABLE

    is_set = os.environ.get(VARIABLE, "").strip()
    if not (is_set and startup.has_fired()):  # type: ignore[no-untyped-call]
        activate_from_environment({**os.environ, VARIABLE: is_set or "1"})
