"""Imports Megatron with the stand-in of TransformerEngine in place, for fork servers, whose forks have both.

A fork server imports this module if ``multiprocessing.set_forkserver_preload`` names it.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from importlib import import_module

from ..errors import MegatronRLPatchesError
from .cpu_backend import cpu_backend

with ExitStack() as _block:
    with suppress(MegatronRLPatchesError):  # the same error comes in ranks, where they enter the block
        _block.enter_context(cpu_backend(transformer_engine=True))
    import_module("megatron_rl_patches.testing.tiny_layers")
import_module("torch._dynamo")  # or else the first optimizer of each rank imports it
