"""The command ``megatron-rl-patches``. The only part of the package that imports typer and rich."""

from .commands import main

__all__ = ["main"]
