"""``reentrant-train`` on one GPU with NCCL: rollouts through several calls equal one uninterrupted run."""

from __future__ import annotations

import torch

from megatron_rl_patches.testing import TinyModel
from tests.gpu.device import DEVICE, needs_gpu
from tests.ranks import on_ranks
from tests.real.test_reentry import check_rollouts
from tests.references.one_device import gpu_or_cpu

pytestmark = needs_gpu


# Variables make the rank a fresh process: one that is forked could not use the GPU.
@on_ranks(1, megatron=False, env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_DEVICE_MAX_CONNECTIONS": "1"})
def test_rollouts_equal_one_uninterrupted_run() -> None:
    with gpu_or_cpu() as device:
        assert device == DEVICE.type
        torch.use_deterministic_algorithms(True, warn_only=True)
        check_rollouts(TinyModel(bf16=True))
