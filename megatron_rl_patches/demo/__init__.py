"""What the patches are for, in a minute: reinforcement learning on real Megatron-core, on any machine.

``digits``, ``policy``, ``training`` and ``program`` are an ordinary program for Megatron-core, which knows
nothing of this package; ``launch``, ``worker`` and ``figures`` run it and show what came out.
"""

from .launch import run_demo

__all__ = ["run_demo"]
