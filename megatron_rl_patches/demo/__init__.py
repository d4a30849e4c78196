"""A minute of reinforcement learning on real Megatron-core, on any machine, which needs the patches.

``launch`` and ``figures`` run it and show the results. The other modules are an ordinary program
for Megatron-core that never mentions a patch.
"""

from .launch import run_demo

__all__ = ["run_demo"]
