"""``python -m megatron_rl_patches``: the same as the command ``megatron-rl-patches``."""

from .cli import main

if __name__ == "__main__":  # and not in the ranks of the demo, which import this module, too
    main()
