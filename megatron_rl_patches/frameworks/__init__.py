"""What is peculiar to slime, vime, miles, OpenClaw-RL, verl, NeMo-RL and AReaL.

These modules know the frameworks' options, and how their functions call each other. Patches call these
modules, and these modules call the cores.
"""

from __future__ import annotations

#: Root packages that have slime's modules under their own name. OpenClaw-RL's is called ``slime``.
SLIME_LIKE = ("slime", "vime")
#: Root packages whose ``backends.megatron_utils`` has slime's functions.
WITH_MEGATRON_UTILS = (*SLIME_LIKE, "miles")
#: Modules of slime's losses, and of what these compute with.
SLIME_LOSSES = [f"{root}.backends.megatron_utils.loss" for root in SLIME_LIKE]
SLIME_MATH = [f"{root}.utils.ppo_utils" for root in SLIME_LIKE]
#: What ``status()`` shows: options of frameworks that have done a patch's work, by function, and a report.
own_options: dict[str, str] = {}


def megatron_utils(module: str) -> list[str]:
    """Return the modules of slime and its relatives with this name in ``backends.megatron_utils``."""
    return [f"{root}.backends.megatron_utils.{module}" for root in WITH_MEGATRON_UTILS]


def miles_losses(module: str) -> list[str]:
    """Return the module of miles' losses with this name, before and after September 2026."""
    return [f"miles.backends.training_utils.{hub}.{module}" for hub in ("loss_hub", "loss.hub")]
