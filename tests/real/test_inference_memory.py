"""The estimate against real bytes on real megatron-core: within one percent, part by part."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl_patches.inference.memory.estimate import OptimizerSettings, ParallelSizes
from tests.real import memory_cases
from tests.real.memory_cases import EXPERTS, TIED, Case, Measured

PLAIN = OptimizerSettings()
BF16_GRADIENTS = OptimizerSettings(use_distributed_optimizer=True, accumulate_allreduce_grads_in_fp32=False)

CASES = [
    Case("bf16"),
    Case("bf16, bf16 gradients", optimizer=BF16_GRADIENTS),
    Case("bf16, plain optimizer", optimizer=PLAIN),
    Case("fp32", dtype="fp32"),
    Case("fp32, plain optimizer", dtype="fp32", optimizer=PLAIN),
    Case("DP 2", optimizer=BF16_GRADIENTS, parallel=ParallelSizes(data_parallel_size=2)),
    Case("PP 2", TIED, parallel=ParallelSizes(pipeline_model_parallel_size=2)),
    Case("EP 2", EXPERTS, parallel=ParallelSizes(expert_model_parallel_size=2, data_parallel_size=2)),
]
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def measured() -> dict[str, list[Measured]]:
    one_rank = [case for case in CASES if case.parallel.world_size == 1]
    two_ranks = [case for case in CASES if case.parallel.world_size == 2]
    return {**memory_cases.measure(one_rank), **memory_cases.measure(two_ranks)}


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_estimate_is_what_is_live(name: str, measured: dict[str, list[Measured]]) -> None:
    estimate = BY_NAME[name].estimate()
    for account in measured[name]:
        stage = estimate.stages[account.rank if len(estimate.stages) > 1 else 0]
        expected = stage.training.device
        for part, real, estimated in memory_cases.parts_of(account.training, expected):
            assert real == one_percent(estimated), part
        assert account.live_training == one_percent(expected.total)
        assert account.live_inference == one_percent(stage.inference_only.device.total)
        [of_chunks] = account.from_chunks.stages
        assert of_chunks.training == stage.training
        assert of_chunks.inference_only == stage.inference_only


def one_percent(number: int) -> Any:
    return pytest.approx(number, rel=0.01)
