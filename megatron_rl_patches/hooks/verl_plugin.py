"""An entry point of the group ``verl.plugins``: ``import verl`` loads it wherever this package is installed.

So it does nothing unless ``MEGATRON_RL_PATCHES`` is set. Then it activates the patches also where Python does
not read the startup file, as after ``pip install --target``. verl hides what a plugin raises. So a failure is
said on stderr, and with ``MEGATRON_RL_PATCHES_STRICT=1`` it raises ``SystemExit``, which verl lets pass.
"""

from __future__ import annotations

import os
import sys

import _megatron_rl_patches_startup as startup

if os.environ.get("MEGATRON_RL_PATCHES", "").strip() and not startup.has_fired():  # type: ignore[no-untyped-call]
    try:
        startup.activate()
    except Exception as error:
        end = "The program ends, because MEGATRON_RL_PATCHES_STRICT is set. Run megatron-rl-patches doctor."
        print(f"megatron_rl_patches: not activated: {error}. {end}", file=sys.stderr)
        raise SystemExit(1) from error
