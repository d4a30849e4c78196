"""In the shape of Megatron-Bridge's: calls copies of ``setup`` and ``train``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron.bridge.training.setup import setup
from megatron.bridge.training.train import train


def pretrain(state: SimpleNamespace, forward_step_func: Any, job: Any, train_data_iterator: Any) -> None:
    """``job`` stands for what the real ``setup`` builds: ``model``, ``optimizer`` and ``scheduler``."""
    setup(state, job.model, job.optimizer)
    train(
        forward_step_func,
        job.model,
        job.optimizer,
        job.scheduler,
        train_data_iterator,
        None,
        state,
        checkpoint_manager=None,
        pg_collection=None,
    )
