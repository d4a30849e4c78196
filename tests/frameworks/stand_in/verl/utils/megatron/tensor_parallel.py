"""In the shape of verl's functions over logits that are split over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from loss_parts import NaiveEntropy
from megatron.core import parallel_state as mpu
from torch import Tensor


class _VocabParallelEntropy:
    @staticmethod
    def apply(logits: Tensor) -> Tensor:
        return NaiveEntropy.apply(logits, mpu.get_tensor_model_parallel_group())  # type: ignore[no-any-return]


def vocab_parallel_entropy(vocab_parallel_logits: Tensor) -> Tensor:
    return _VocabParallelEntropy.apply(vocab_parallel_logits)


def vocab_parallel_entropy_with_chunking(vocab_parallel_logits: Tensor, chunk_size: int = 2048) -> Tensor:
    chunks = vocab_parallel_logits.split(chunk_size, dim=1)
    return torch.cat([_VocabParallelEntropy.apply(chunk).float() for chunk in chunks], dim=1)


def vocab_parallel_sum_pi_squared(vocab_parallel_logits: Tensor) -> Tensor:
    import torch.distributed.nn

    group = mpu.get_tensor_model_parallel_group()
    total = torch.distributed.nn.all_reduce(vocab_parallel_logits.exp().sum(-1), group=group)
    squares = torch.distributed.nn.all_reduce((2 * vocab_parallel_logits).exp().sum(-1), group=group)
    return squares / total.square()


def vocab_parallel_log_probs_from_logits(logits: Tensor, labels: Tensor) -> Any:
    from megatron.core import tensor_parallel

    return -tensor_parallel.vocab_parallel_cross_entropy(vocab_parallel_logits=logits, target=labels)
