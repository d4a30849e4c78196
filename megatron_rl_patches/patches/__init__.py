"""One file per patch: the sites in the frameworks, each bound to a core. Found by listing this folder.

``docs/patches/NAME.md`` lists the functions of each patch, and what changes in them. In this folder *slime*
stands for vime and OpenClaw-RL, too: vime has slime's modules under its own name, OpenClaw-RL under slime's.
"""
