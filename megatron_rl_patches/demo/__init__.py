"""Real Megatron-core, trained by reinforcement learning on any machine: what the patches are for, in a minute.

``digits``, ``policy``, ``training`` and ``program`` are an ordinary program for Megatron-core that knows nothing
of this package; ``launch``, ``worker`` and ``figures`` run it and show what came out.
"""

from .launch import run_demo

__all__ = ["run_demo"]
