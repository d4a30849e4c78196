"""In the shape of slime's: a rollout, cut into microbatches of packed samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rl_framework import DataIterator


def get_batch(data_iterator: DataIterator, keys: Sequence[str]) -> dict[str, Any]:
    batch = data_iterator.get_next(keys)
    batch["tokens"] = torch.cat(batch["tokens"])[None]
    return batch
