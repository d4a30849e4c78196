"""A trainer of a user's, whose ``train()`` works once per process without the patches.

Copied into a package ``my_rl``, beside the loop of ``tests/references/tiny_gpt.py``.
"""

from megatron_rl_patches.testing import tiny_model

from .loop import data_iterators
from .loop import train as train_steps

TINY = tiny_model("dense")


def build():
    return TINY.build()


def train(model, optimizer):
    return train_steps(model, optimizer, data_iterators(TINY), [2, 2], TINY)
