"""``reentrant-train`` on one GPU with NCCL: rollouts through several calls equal one uninterrupted run."""

from __future__ import annotations

import torch

from megatron_rl_patches.testing import spawn_ranks
from tests.gpu.device import DEVICE, needs_gpu
from tests.real.one_device import gpu_or_cpu

pytestmark = needs_gpu


def _check() -> str:
    with gpu_or_cpu() as device:
        from tests.real.test_reentry import check_rollouts
        from tests.real.tiny_gpt import Options

        torch.use_deterministic_algorithms(True, warn_only=True)
        check_rollouts(Options(bf16=True))
        return device


def test_rollouts_equal_one_uninterrupted_run() -> None:
    # Variables make the rank a fresh process: one that is forked could not use the GPU.
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert spawn_ranks(_check, 1, env=variables) == [DEVICE.type]
