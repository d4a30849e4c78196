"""Where checkouts of frameworks are: environment variables say it."""

from __future__ import annotations

import os
from collections.abc import Callable

Checkouts = Callable[[str], list[str]]
"""Framework -> the folders to import it from."""

#: slime, vime and miles train through Megatron-LM's ``megatron.training``.
VARIABLES = {
    "slime": ("SLIME_DIR", "MEGATRON_LM_DIR"),
    "vime": ("VIME_DIR", "MEGATRON_LM_DIR"),
    "miles": ("MILES_DIR", "MEGATRON_LM_DIR"),
    "megatron.training": ("MEGATRON_LM_DIR",),
    "verl": ("VERL_DIR",),
}


def repositories() -> list[str]:
    """All that are given; ``FRAMEWORK_REPOSITORIES`` has more, separated like the folders of ``PATH``."""
    names = {name for variables in VARIABLES.values() for name in variables}
    given = [os.environ.get(name, "") for name in sorted(names)]
    return [
        folder for folder in given + os.environ.get("FRAMEWORK_REPOSITORIES", "").split(os.pathsep) if folder
    ]
