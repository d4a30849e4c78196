"""The work of the environment variable, done when the first framework is about to be imported."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from .engine import registry
from .engine.installer import installer
from .errors import PatchError
from .settings import VARIABLE, Settings, parse_selection

_log = logging.getLogger("megatron_rl_patches")


def activate_from_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Put in place what ``MEGATRON_RL_PATCHES`` selects. Registers import hooks only.

    Raises:
        PatchError: only with ``MEGATRON_RL_PATCHES_STRICT=1``; otherwise bad values cost one warning, and
            leave the defaults of their variables.
    """
    settings, refused = Settings.without_bad_values(environ)
    messages = list(refused.values())
    selection = parse_selection(environ.get(VARIABLE, ""), registry.patches())
    if selection.unknown:
        messages.append(f"{VARIABLE}: {registry.unknown_names(selection.unknown)}")
    if messages and settings.strict:
        raise PatchError("; ".join(messages))
    if messages:
        _log.warning("megatron_rl_patches: %s; going on without", "; ".join(messages))
    if selection:
        # Options of an apply() that the program has called itself stay in force.
        claim = installer.add(selection.patches(), settings, required=settings.strict, replace_options=False)
        installer.keep(claim)
