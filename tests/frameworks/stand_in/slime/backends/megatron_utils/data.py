"""In the shape of slime's: a rollout, cut into microbatches of packed samples."""

from typing import Any

import torch


def get_batch(data_iterator: Any, keys: list[str]) -> dict[str, Any]:
    batch = data_iterator.get_next(keys)
    batch["tokens"] = torch.cat(batch["tokens"])[None]
    return batch
