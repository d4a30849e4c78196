"""In the shape of slime's actor: it calls copies of the names, made when it was imported."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from rl_framework import DataIterator, WeightsBackuper

from .model import save, train


class MegatronTrainActor:
    def __init__(self, args: SimpleNamespace, model: Any, optimizer: Any, opt_param_scheduler: Any) -> None:
        self.args = args
        self.model = model
        self.optimizer = optimizer
        self.opt_param_scheduler = opt_param_scheduler

    def train(self, rollout_id: int, data_iterator: Sequence[Any], num_microbatches: Sequence[int]) -> None:
        sizes = [self.args.micro_batch_size * number for number in num_microbatches]
        state = self.model, self.optimizer, self.opt_param_scheduler
        train(rollout_id, *state, data_iterator, num_microbatches, sizes)

    def save_model(self, iteration: int) -> None:
        save(iteration, self.model, self.optimizer, self.opt_param_scheduler)


class MegatronTrainRayActor(MegatronTrainActor):
    """Takes rollouts, and swaps the weights of other models into its own."""

    def __init__(self, *state: Any) -> None:
        super().__init__(*state)
        self.weights_backuper = WeightsBackuper(self.model[0].module)
        self.weights_backuper.backup("actor")

    def load_other_checkpoint(self, model_tag: str, path: str) -> None:
        self.model[0].module.load_state_dict(torch.load(f"{path}/weights.pt"), strict=False)
        self.weights_backuper.backup(model_tag)

    def _switch_model(self, target_tag: str) -> None:
        self.weights_backuper.restore(target_tag)

    def train_actor(self, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        indices = rollout_data["micro_batch_indices"]
        state = self.model, self.optimizer, self.opt_param_scheduler
        iterator = DataIterator(rollout_data, indices)
        train(rollout_id, *state, [iterator], [len(indices)], [len(rollout_data["tokens"])])
        self.weights_backuper.backup("actor")
