"""In the shape of miles' actor: it calls copies of the names, made when it was imported."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from rl_framework import DataIterator, WeightsBackuper

from .model import TrainStepOutcome, save, train


class MegatronTrainActor:
    def __init__(self, args: SimpleNamespace, model: Any, optimizer: Any, opt_param_scheduler: Any) -> None:
        self.args = args
        self.model = model
        self.optimizer = optimizer
        self.opt_param_scheduler = opt_param_scheduler

    def train(
        self, rollout_id: int, data_iterator: Sequence[Any], num_microbatches: Sequence[int]
    ) -> TrainStepOutcome:
        rollouts = [self.args.micro_batch_size * number for number in num_microbatches]
        return train(
            rollout_id,
            self.model,
            self.optimizer,
            self.opt_param_scheduler,
            data_iterator,
            num_microbatches,
            num_rollouts=rollouts,
            witness_info=None,
            attempt=0,
        )

    def save_model(self, iteration: int) -> None:
        save(iteration, self.model, self.optimizer, self.opt_param_scheduler)


class MegatronTrainRayActor(MegatronTrainActor):
    """Takes rollouts, and swaps the weights of other models into its own if it was told so at its start."""

    def __init__(self, *state: Any, with_opd_teacher: bool = False) -> None:
        super().__init__(*state)
        self.with_opd_teacher = with_opd_teacher
        self.weights_backuper = WeightsBackuper(self.model[0].module)
        if self._enable_weight_backup:
            self.weights_backuper.backup("actor")

    @property
    def _enable_weight_backup(self) -> bool:
        return self.with_opd_teacher

    def load_other_checkpoint(self, model_tag: str, path: str) -> None:
        self.model[0].module.load_state_dict(torch.load(f"{path}/weights.pt"), strict=False)
        self.weights_backuper.backup(model_tag)

    def _switch_model(self, target_tag: str) -> None:
        if self._enable_weight_backup:
            self.weights_backuper.restore(target_tag)

    def train_actor(
        self,
        rollout_id: int,
        rollout_data: dict[str, Any],
        external_data: Any = None,
        *,
        witness_info: Any,
        attempt: int,
    ) -> TrainStepOutcome:
        indices = rollout_data["micro_batch_indices"]
        outcome = train(
            rollout_id,
            self.model,
            self.optimizer,
            self.opt_param_scheduler,
            [DataIterator(rollout_data, indices)],
            [len(indices)],
            [len(rollout_data["tokens"])],
            witness_info=witness_info,
            attempt=attempt,
        )
        if self._enable_weight_backup:
            self.weights_backuper.backup("actor")
        return outcome
