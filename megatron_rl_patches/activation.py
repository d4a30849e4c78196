"""What the environment variable does, once a host is about to be imported."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from types import ModuleType

import _megatron_rl_patches_startup as startup

from .engine import registry
from .engine.installer import installer
from .errors import PatchError
from .settings import VARIABLE, Settings, parse_selection

_log = logging.getLogger("megatron_rl_patches")


def activate_from_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Put in place what ``MEGATRON_RL_PATCHES`` selects. Registers import hooks only.

    Raises:
        PatchError: only with ``MEGATRON_RL_PATCHES_STRICT=1``; otherwise all bad values cost one warning.
    """
    told = []
    try:
        settings = Settings.from_environment(environ)
    except PatchError as error:
        if startup.is_strict(environ):  # type: ignore[no-untyped-call]
            raise
        told.append(f"{error}; going on with the defaults")
        settings = Settings()
    selection = parse_selection(environ.get(VARIABLE, ""), registry.patches())
    if selection.unknown:
        told.append(f"{VARIABLE}: {registry.unknown_names(selection.unknown)}")
        if settings.strict:
            raise PatchError(told[-1])
    if told:
        _log.warning("megatron_rl_patches: %s", "; ".join(told))
    if selection:
        chosen = registry.select(selection.names or (), selection.exclude, selection.also)
        installer.add(chosen, settings, must=settings.strict)


def autowrapt(_: ModuleType) -> None:
    """Post-import hook for ``AUTOWRAPT_BOOTSTRAP``: all patches, unless the variable says otherwise."""
    environ = {VARIABLE: "all", **os.environ}
    startup.unless_strict_never_raise(  # type: ignore[no-untyped-call]
        lambda: activate_from_environment(environ)
    )
