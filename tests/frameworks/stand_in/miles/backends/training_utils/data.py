"""In the shape of miles': a rollout, cut into microbatches of packed samples."""

from typing import Any

import torch


def get_batch(data_iterator: Any, keys: list[str], pad_multiplier: int = 1) -> dict[str, Any]:
    batch = data_iterator.get_next([*keys, "adapter_slots"])
    batch["tokens"] = torch.cat(batch["tokens"])[None]
    return batch
