"""In the shape of miles' actor: it calls copies of the names, made when it was imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_framework import Actor, DataIterator

from .model import save, train


class MegatronTrainRayActor(Actor):
    """Takes rollouts, and swaps the weights of other models into its own if it was told so at its start."""

    def __init__(self, *state: Any, with_opd_teacher: bool = False) -> None:
        super().__init__(*state)
        self.with_opd_teacher = with_opd_teacher
        if self._enable_weight_backup:
            self.weights_backuper.backup("actor")

    @property
    def _enable_weight_backup(self) -> bool:
        return self.with_opd_teacher

    def train(self, rollout_id: int, data_iterator: Sequence[Any], num_microbatches: Sequence[int]) -> str:
        rollouts = [self.args.micro_batch_size * number for number in num_microbatches]
        return train(rollout_id, *self.state, data_iterator, num_microbatches, rollouts, None, attempt=0)

    def train_actor(
        self,
        rollout_id: int,
        rollout_data: dict[str, Any],
        external_data: Any = None,
        *,
        witness_info: Any,
        attempt: int,
    ) -> str:
        indices = rollout_data["micro_batch_indices"]
        microbatches = [DataIterator(rollout_data, indices)], [len(indices)], [len(rollout_data["tokens"])]
        outcome = train(rollout_id, *self.state, *microbatches, witness_info=witness_info, attempt=attempt)
        if self._enable_weight_backup:
            self.weights_backuper.backup("actor")
        return outcome

    def save_model(self, iteration: int) -> None:
        save(iteration, *self.state)

    def _switch_model(self, target_tag: str) -> None:
        if self._enable_weight_backup:
            self.weights_backuper.restore(target_tag)
