"""A trainer of a user's, whose ``train()`` works once per process without the patches.

Copied into a package ``my_rl``, beside the loop of ``tests/real/tiny_gpt.py``.
"""

from .loop import Options, data_iterators
from .loop import build as build_gpt
from .loop import train as train_steps

OPTIONS = Options()


def build():
    return build_gpt(OPTIONS)


def train(model, optimizer):
    return train_steps(model, optimizer, data_iterators(OPTIONS), [2, 2], OPTIONS)
