"""What is peculiar to slime, vime, miles, OpenClaw-RL, verl, NeMo-RL and AReaL.

These modules know the frameworks' options, and how their functions call each other. Patches call these
modules, and these modules call the cores.
"""

from __future__ import annotations

#: Root packages that have slime's modules under their own name. OpenClaw-RL's is called ``slime``.
SLIME_LIKE = ("slime", "vime")
#: Root packages whose ``backends.megatron_utils`` has slime's functions.
WITH_MEGATRON_UTILS = (*SLIME_LIKE, "miles")
#: Options of frameworks that have done a patch's work, by the patched function: ``status()`` shows them.
own_options: dict[str, str] = {}
