"""In the shape of verl's engine: it calls copies of the registering and of the scoring functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from steps import run_microbatches, zero_gradients
from torch import Tensor

from verl.utils.megatron.tensor_parallel import (
    vocab_parallel_entropy,
    vocab_parallel_entropy_with_chunking,
    vocab_parallel_log_probs_from_logits,
    vocab_parallel_sum_pi_squared,
)
from verl.utils.megatron_utils import register_megatron_training_hooks


class MegatronEngine:
    def __init__(self, module: Any, optimizer: Any) -> None:
        self.module = module
        self.optimizer = optimizer

    def initialize(self) -> None:
        register_megatron_training_hooks(self.module, self.optimizer)

    def train_batch(self, forward_step: Any, data_iterator: Any, sizes: Any) -> list[Any]:
        zero_gradients(self.module, self.optimizer)
        losses: list[Any] = run_microbatches(
            sizes, forward_step, data_iterator, self.module, sizes.num_microbatches
        )
        update_successful, _, _ = self.optimizer.step()
        assert update_successful
        return losses


class MegatronEngineWithLMHead(MegatronEngine):
    engine_config: Any

    def _lm_head_logits_processor(
        self,
        logits: Tensor,
        label: Tensor,
        temperature: Tensor,
        *,
        calculate_sum_pi_squared: bool,
        calculate_entropy: bool,
        distillation_use_topk: bool,
        distillation_only: bool,
        logits_processor_func: Callable[..., dict[str, Tensor]],
        batch: Any,
        data_format: str,
    ) -> dict[str, Tensor]:
        logits.div_(temperature.unsqueeze(-1).to(logits.dtype))
        result = {}
        if calculate_sum_pi_squared:
            result["sum_pi_squared"] = vocab_parallel_sum_pi_squared(logits)
        to_overwrite = logits
        if calculate_entropy:
            to_overwrite = logits.clone()
            if self.engine_config.entropy_from_logits_with_chunking:
                size = self.engine_config.entropy_from_logits_chunk_size
                result["entropy"] = vocab_parallel_entropy_with_chunking(logits, chunk_size=size)
            else:
                result["entropy"] = vocab_parallel_entropy(logits)
        if distillation_use_topk:
            result |= logits_processor_func(student_logits=to_overwrite, data=batch, data_format=data_format)
        if not distillation_only:
            result["log_probs"] = vocab_parallel_log_probs_from_logits(to_overwrite, label)
        return result
