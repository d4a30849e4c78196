"""Where frameworks are: their repositories, and the environment variables that name checkouts."""

import os
from collections.abc import Callable

Checkouts = Callable[[str], list[str]]
"""Framework -> the folders to import it from."""

#: First word of a source's name -> its repository.
REPOSITORIES = {
    "slime": "THUDM/slime",
    "vime": "vllm-project/vime",
    "OpenClaw-RL": "Gen-Verse/OpenClaw-RL",
    "miles": "radixark/miles",
    "verl": "verl-project/verl",
    "NeMo-RL": "NVIDIA-NeMo/RL",
    "Megatron-Bridge": "NVIDIA-NeMo/Megatron-Bridge",
    "AReaL": "areal-project/AReaL",
    "Megatron-LM": "NVIDIA/Megatron-LM",
}

#: slime, vime and miles train through Megatron-LM's ``megatron.training``.
VARIABLES = {
    "slime": ("SLIME_DIR", "MEGATRON_LM_DIR"),
    "vime": ("VIME_DIR", "MEGATRON_LM_DIR"),
    "miles": ("MILES_DIR", "MEGATRON_LM_DIR"),
    "megatron.training": ("MEGATRON_LM_DIR",),
    "verl": ("VERL_DIR",),
}
DIRECTORIES = sorted({name for variables in VARIABLES.values() for name in variables})


def repositories() -> list[str]:
    """All that are given; ``FRAMEWORK_REPOSITORIES`` has more, separated like the folders of ``PATH``."""
    given = [os.environ.get(name, "") for name in DIRECTORIES]
    return [
        folder for folder in given + os.environ.get("FRAMEWORK_REPOSITORIES", "").split(os.pathsep) if folder
    ]
