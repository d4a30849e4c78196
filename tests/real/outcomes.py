"""What ranks report of a run; importable where Megatron is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Checksums:
    """Hashes of one rank's weights."""

    params: str  # which all data-parallel ranks share
    replicated: str  # those of them that all tensor-parallel ranks share
    whole: str  # with the optimizer's shard

    @classmethod
    def of(cls, model: Sequence[torch.nn.Module], optimizer: Any) -> Checksums:
        from tests.real import tiny_gpt

        class NoOptimizer:
            param_groups: tuple[()] = ()

        replicated = torch.nn.ParameterList(
            parameter
            for chunk in model
            for parameter in chunk.parameters()
            if not getattr(parameter, "tensor_model_parallel", False)
        )
        return cls(
            tiny_gpt.checksum(model, NoOptimizer),
            tiny_gpt.checksum([replicated], NoOptimizer),
            tiny_gpt.checksum(model, optimizer),
        )


@dataclass
class Outcome:
    """What one rank reports of a run."""

    losses: list[float]
    at_reentry: Checksums
    end: Checksums
