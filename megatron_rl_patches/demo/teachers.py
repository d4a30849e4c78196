"""The teachers, one for each order: a short supervised run, saved as Megatron saves, loaded to score only.

However many there are, they share one model on the device; their weights wait in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from megatron.core import dist_checkpointing, parallel_state

from ..inference import (
    TeacherPool,
    build_inference_model,
    estimate_memory,
    forward_log_probs,
    forward_topk,
)
from ..inference.estimate import MemoryEstimate, OptimizerSettings, ParallelSizes
from ..losses import TopKDistribution
from . import digits
from .objectives import supervised_loss
from .policy import answer, build, config, from_last_stage, generator_beside, provide
from .training import Batch, train

_STEPS, _BATCH = 150, 64


class Teachers:
    """Score answers, each by the teacher for the order that its prompt asks for."""

    def __init__(self, folder: Path, seed: int) -> None:
        """Load the teachers of ``folder``, which all ranks share; those that it lacks are trained first."""
        for number, order in enumerate(digits.ORDERS):
            if not (folder / order).exists():
                _train_and_save(order, seed + number, folder / order)
        self.model = build_inference_model(provide, config(), dtype="fp32")
        self.pool = TeacherPool(self.model)
        for order in digits.ORDERS:
            self.pool.add(order, folder / order)

    def __call__(self, tokens_bs: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the answers, ``[b, DIGITS]``, for prompts with answers."""
        log_probs_bd = tokens_bs.new_empty(len(tokens_bs), digits.DIGITS, dtype=torch.float32)
        for order in digits.ORDERS:
            asked_b = digits.asks_for(tokens_bs, order)
            with self.pool.use(order) as model:
                scores = forward_log_probs(
                    model, [microbatch(tokens_bs[asked_b])], output_device=tokens_bs.device, progress=False
                )
            if scores is not None:
                log_probs_bd[asked_b] = torch.stack(scores.log_probs)
        return from_last_stage(log_probs_bd)

    def distributions(
        self, tokens_bs: torch.Tensor, at: list[TopKDistribution] | None
    ) -> dict[str, list[TopKDistribution]]:
        """Of each teacher for each answer, at the ids of ``at``; empty but on the last pipeline stage."""
        found = {}
        for order in digits.ORDERS:
            with self.pool.use(order) as model:
                found[order] = forward_topk(
                    model, [microbatch(tokens_bs)], at=at, output_device=tokens_bs.device, progress=False
                )
        return {order: of_teacher for order, of_teacher in found.items() if of_teacher is not None}

    def score(self, order: str, prompts_bp: torch.Tensor) -> torch.Tensor:
        """Share of the digits that a teacher gets right."""
        with self.pool.use(order) as model:
            return digits.score(answer(model, prompts_bp, None)[0]).mean()

    def memory(self) -> MemoryEstimate:
        """What a rank takes to train such a model, to score with one, and to train beside these teachers."""
        return estimate_memory(
            self.model,
            parallel=ParallelSizes(
                tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
                pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
                data_parallel_size=parallel_state.get_data_parallel_world_size(),
            ),
            dtype="fp32",
            optimizer=OptimizerSettings(use_distributed_optimizer=True),
            teachers=len(self.pool),
        )


def microbatch(tokens_bs: torch.Tensor) -> dict[str, Any]:
    """Prompts with answers, as models are asked to score them."""
    count, length = tokens_bs.shape
    return {
        "tokens": tokens_bs,
        "lengths": [length] * count,
        "response_lengths": [digits.DIGITS] * count,
    }


def _train_and_save(order: str, seed: int, folder: Path) -> None:
    model, optimizer = build(seed)
    train(
        model, optimizer, _solved(order, generator_beside(model, seed)), [1] * _STEPS, _BATCH, supervised_loss
    )
    _save(model, optimizer, _STEPS, folder)


def _solved(order: str, generator: torch.Generator) -> Iterator[Batch]:
    while True:
        prompts_bp = digits.prompts(_BATCH, generator, order)
        yield {"tokens": torch.cat([prompts_bp, digits.solve(prompts_bp)], dim=1)}


def _save(model: list[Any], optimizer: Any, iteration: int, root: Path) -> None:
    """As Megatron-LM does with ``--ckpt-format torch_dist``: model, optimizer and iteration."""
    folder = root / f"iter_{iteration:07d}"
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    state: dict[str, Any] = {"iteration": iteration, "model": model[0].module.sharded_state_dict()}
    sharding = {"distrib_optim_sharding_type": "dp_reshardable"}
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=sharding)
    dist_checkpointing.save(state, str(folder))
    if torch.distributed.get_rank() == 0:
        (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    torch.distributed.barrier()
