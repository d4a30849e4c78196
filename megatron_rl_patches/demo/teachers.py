"""The teachers, one for each order, trained in a short supervised run, saved, and loaded to score only.

All teachers share one model on the device; their weights are kept in host memory.
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
    forward_hidden_states,
    forward_log_probs,
)
from ..inference.memory.estimate import MemoryEstimate, OptimizerSettings
from ..losses import FullDistribution, TopKDistribution
from . import policy
from .policy import DIGITS, ORDERS
from .training import policy_loss, train

_STEPS, _BATCH = 150, 64


class Teachers:
    """Scores answers, each by the teacher for the order of its prompt."""

    def __init__(self, folder: Path, seed: int) -> None:
        """Load the teachers from ``folder``, which all ranks share; train those that are not in it."""
        for number, order in enumerate(ORDERS):
            if not (folder / order).exists():
                _train_and_save(order, seed + number, folder / order)
        self.model = build_inference_model(policy.provide, policy.config(), dtype="fp32")
        self.pool = TeacherPool(self.model)
        for order in ORDERS:
            self.pool.add(order, folder / order)

    def __call__(self, tokens_bs: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of the answers, ``[b, DIGITS]``, for prompts with answers."""
        log_probs_bd = tokens_bs.new_empty(len(tokens_bs), DIGITS, dtype=torch.float32)
        for index, order in enumerate(ORDERS):
            selected_b = policy.order_of(tokens_bs) == index
            batch = policy.microbatch(tokens_bs[selected_b])
            with self.pool.use(order) as model:
                scores = forward_log_probs(model, [batch], output_device=tokens_bs.device, progress=False)
            if scores is not None:
                log_probs_bd[selected_b] = torch.stack(scores.log_probs)
        return policy.broadcast_from_last_stage(log_probs_bd)

    def full(self, tokens_bs: torch.Tensor) -> dict[str, list[FullDistribution]]:
        """Return each teacher's distributions over the whole vocabulary, as :meth:`topk` does."""
        distributions = {}
        for order in ORDERS:
            with self.pool.use(order) as model:
                hidden = forward_hidden_states(model, [policy.microbatch(tokens_bs)], progress=False)
            head = self.pool.head(order)
            if hidden is not None and head is not None:
                distributions[order] = [FullDistribution.of(hidden_dh, head) for hidden_dh in hidden]
        return distributions

    def topk(
        self, tokens_bs: torch.Tensor, at: list[TopKDistribution] | None
    ) -> dict[str, list[TopKDistribution]]:
        """Return each teacher's distributions of all answers by order, on the last pipeline stage."""
        distributions = {}
        for order in ORDERS:
            with self.pool.use(order) as model:
                if scored := policy.topk(model, policy.microbatch(tokens_bs), at=at):
                    distributions[order] = scored
        return distributions

    def score(self, order: str, prompts_bp: torch.Tensor) -> torch.Tensor:
        """Return the fraction of digits that a teacher gets right."""
        with self.pool.use(order) as model:
            return policy.score(policy.answer(model, prompts_bp, None)[0]).mean()

    def memory(self) -> MemoryEstimate:
        """Estimate a rank's memory: for training, for scoring, and for training with these teachers."""
        return estimate_memory(
            self.model,
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            dtype="fp32",
            optimizer=OptimizerSettings(use_distributed_optimizer=True),
            teachers=len(self.pool),
        )


def _train_and_save(order: str, seed: int, root: Path) -> None:
    """Save model, optimizer and iteration as Megatron-LM does with ``--ckpt-format torch_dist``."""
    model, optimizer = policy.build(seed)
    batches = _solved_prompts(order, policy.make_generator(model, seed))
    train(model, optimizer, batches, [1] * _STEPS, _BATCH, policy_loss)
    folder = root / f"iter_{_STEPS:07d}"
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    state: dict[str, Any] = {"iteration": _STEPS, "model": model[0].module.sharded_state_dict()}
    sharding = {"distrib_optim_sharding_type": "dp_reshardable"}
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=sharding)
    dist_checkpointing.save(state, str(folder))
    if torch.distributed.get_rank() == 0:
        (root / "latest_checkpointed_iteration.txt").write_text(str(_STEPS))
    torch.distributed.barrier()


def _solved_prompts(order: str, generator: torch.Generator) -> Iterator[policy.Batch]:
    while True:
        prompts_bp = policy.prompts(_BATCH, generator, order)
        answers_bd = policy.solve(prompts_bp)
        tokens_bs = torch.cat([prompts_bp, answers_bd], dim=1)
        yield {"tokens": tokens_bs, "advantages": torch.ones_like(answers_bd, dtype=torch.float32)}
