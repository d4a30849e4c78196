"""In the shape of slime's: a rollout, cut into microbatches of packed samples."""

from collections.abc import Sequence
from typing import Any

import torch


class DataIterator:
    def __init__(self, rollout_data: dict[str, Any]) -> None:
        self.rollout_data, self.offset = rollout_data, 0
        self.micro_batch_indices = rollout_data["micro_batch_indices"]

    def get_next(self, keys: Sequence[str]) -> dict[str, Any]:
        indices = self.micro_batch_indices[self.offset]
        self.offset += 1
        selected = {key: self.rollout_data.get(key) for key in keys}
        return {key: values and [values[i] for i in indices] for key, values in selected.items()}

    def reset(self) -> None:
        self.offset = 0


def get_batch(data_iterator: DataIterator, keys: Sequence[str]) -> dict[str, Any]:
    batch = data_iterator.get_next(keys)
    batch["tokens"] = torch.cat(batch["tokens"])[None]
    return batch
