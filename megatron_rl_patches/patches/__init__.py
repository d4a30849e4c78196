"""One file per patch: the sites in the frameworks, each bound to a core. Found by listing this folder.

In tables *slime* stands for vime and OpenClaw-RL, too: the first has slime's modules under its own name, the
second under slime's.
"""
