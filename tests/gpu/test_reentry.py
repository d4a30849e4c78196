"""``reentrant-train`` on one GPU with NCCL: rollouts through several calls equal one uninterrupted run."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl_patches import Settings, applied
from megatron_rl_patches.testing import spawn_ranks
from tests.gpu.device import DEVICE, needs_gpu
from tests.real.one_device import gpu_or_cpu

pytestmark = needs_gpu

ROLLOUTS, STEPS, MICROBATCHES = 4, 2, 2
SETTINGS = Settings(train_functions=("tests.real.tiny_gpt:train",))


def _compare() -> tuple[str, Any, Any]:
    with gpu_or_cpu() as device:
        import torch

        from tests.real import tiny_gpt

        torch.use_deterministic_algorithms(True, warn_only=True)
        options = tiny_gpt.Options(bf16=True)

        def trained(rollouts: int, steps: int) -> tuple[list[float], str]:
            model, optimizer = tiny_gpt.build(options)
            data, losses = tiny_gpt.data_iterators(options), []
            for _ in range(rollouts):
                losses += tiny_gpt.train(model, optimizer, data, [MICROBATCHES] * steps, options)
            return losses, tiny_gpt.checksum(model, optimizer)

        with pytest.raises(AssertionError, match="When overlap_grad_reduce is True"):
            trained(2, STEPS)
        uninterrupted = trained(1, ROLLOUTS * STEPS)
        with applied("reentrant-train", settings=SETTINGS):
            return device, uninterrupted, trained(ROLLOUTS, STEPS)


def test_rollouts_equal_one_uninterrupted_run() -> None:
    # Variables make the rank a fresh process: one that is forked could not use the GPU.
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    [(device, uninterrupted, patched)] = spawn_ranks(_compare, 1, env=variables)
    assert device == DEVICE.type
    assert len(patched[0]) == ROLLOUTS * STEPS
    assert patched == uninterrupted
