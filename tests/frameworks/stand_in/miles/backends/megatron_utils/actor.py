"""In the shape of miles' actor: it calls copies of the names, made when it was imported."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

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
