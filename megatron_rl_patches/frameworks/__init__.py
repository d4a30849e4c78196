"""What is peculiar to slime, miles, OpenClaw-RL, verl, NeMo-RL and AReaL.

These modules know the frameworks' options, and how their functions call each other. Patches call these
modules, and these modules call the cores.
"""
