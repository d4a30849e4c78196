"""The work of the environment variable, done when the first framework is about to be imported."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import _megatron_rl_patches_startup as startup

from .engine import registry
from .engine.installer import installer
from .engine.settings import VARIABLE, Settings, parse_selection
from .errors import PatchError

_log = logging.getLogger("megatron_rl_patches")


def activate_from_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Put in place what ``MEGATRON_RL_PATCHES`` selects. Registers import hooks only.

    Raises:
        PatchError: only with ``MEGATRON_RL_PATCHES_STRICT=1``; otherwise all bad values cost one warning.
    """
    messages = []
    try:
        settings = Settings.from_environment(environ)
    except PatchError as error:
        if startup.is_strict(environ):  # type: ignore[no-untyped-call]
            raise
        messages.append(f"{error}; going on with the defaults")
        settings = Settings()
    selection = parse_selection(environ.get(VARIABLE, ""), registry.patches())
    if selection.unknown:
        messages.append(f"{VARIABLE}: {registry.unknown_names(selection.unknown)}")
        if settings.strict:
            raise PatchError(messages[-1])
    if messages:
        _log.warning("megatron_rl_patches: %s", "; ".join(messages))
    if selection:
        # Options of an apply() that the program has called itself stay in force.
        claim = installer.add(selection.patches(), settings, required=settings.strict, replace_options=False)
        installer.keep(claim)
