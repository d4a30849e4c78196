"""Reinforcement learning on real Megatron-core, on any machine, which needs the patches.

``launch`` starts the ranks. ``program`` is an ordinary program for Megatron-core that never mentions a patch.
"""

from .launch import run_demo

__all__ = ["run_demo"]
