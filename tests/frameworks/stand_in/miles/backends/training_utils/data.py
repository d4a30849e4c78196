"""In the shape of miles': a rollout, cut into microbatches of packed samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rl_framework import DataIterator


def get_batch(
    data_iterator: DataIterator, keys: Sequence[str], pad_multiplier: int = 1, qkv_format: str = "thd"
) -> dict[str, Any]:
    batch = data_iterator.get_next([*keys, "adapter_slots"])
    batch["tokens"] = torch.cat(batch["tokens"])[None]
    return batch
