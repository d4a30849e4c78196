"""In the shape of verl's engine: it calls a copy of the registering function."""

from __future__ import annotations

from typing import Any

from megatron.core.pipeline_parallel import get_forward_backward_func

from verl.utils.megatron_utils import register_megatron_training_hooks


class MegatronEngine:
    def __init__(self, module: Any, optimizer: Any) -> None:
        self.module = module
        self.optimizer = optimizer

    def initialize(self) -> None:
        register_megatron_training_hooks(self.module, self.optimizer)

    def train_batch(self, forward_step: Any, data_iterator: Any, **schedule: int) -> list[Any]:
        for chunk in self.module:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data_iterator,
            model=self.module,
            forward_only=False,
            **schedule,
        )
        update_successful, _, _ = self.optimizer.step()
        assert update_successful
        return losses
