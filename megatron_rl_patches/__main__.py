"""``python -m megatron_rl_patches``: the same as the command ``megatron-rl-patches``."""

from .cli import main

main()
