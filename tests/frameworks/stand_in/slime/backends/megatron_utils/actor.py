"""In the shape of slime's actor: it calls copies of the names, made when it was imported."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from .model import forward_only, save, train


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

    def compute_log_prob(self, data_iterator: Sequence[Any], num_microbatches: Sequence[int]) -> list[Any]:
        return forward_only(self.args, self.model, data_iterator, num_microbatches)

    def save_model(self, iteration: int) -> None:
        save(iteration, self.model, self.optimizer, self.opt_param_scheduler)
