"""In the shape of slime's actor: it calls copies of the names, made when it was imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_framework import Actor, DataIterator

from .model import save, train


class MegatronTrainRayActor(Actor):
    """Takes rollouts, and swaps the weights of other models into its own."""

    def __init__(self, *state: Any) -> None:
        super().__init__(*state)
        self.weights_backuper.backup("actor")

    def train(self, rollout_id: int, data_iterator: Sequence[Any], num_microbatches: Sequence[int]) -> None:
        sizes = [self.args.micro_batch_size * number for number in num_microbatches]
        train(rollout_id, *self.state, data_iterator, num_microbatches, sizes)

    def train_actor(self, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        indices = rollout_data["micro_batch_indices"]
        iterator = DataIterator(rollout_data, indices)
        train(rollout_id, *self.state, [iterator], [len(indices)], [len(rollout_data["tokens"])])
        self.weights_backuper.backup("actor")

    def save_model(self, iteration: int) -> None:
        save(iteration, *self.state)

    def _switch_model(self, target_tag: str) -> None:
        self.weights_backuper.restore(target_tag)
