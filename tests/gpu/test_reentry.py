"""``reentrant-train`` on one GPU with NCCL: rollouts through several calls equal one uninterrupted run."""

from __future__ import annotations

from megatron_rl_patches import applied
from megatron_rl_patches.testing import spawn_ranks
from tests.gpu.device import DEVICE, needs_gpu
from tests.real.one_device import gpu_or_cpu
from tests.real.test_reentry import ROLLOUTS, SETTINGS, STEPS, Run, _rollouts

pytestmark = needs_gpu


def _compare() -> tuple[str, dict[str, Run]]:
    with gpu_or_cpu() as device:
        import torch

        from tests.real.tiny_gpt import Options

        torch.use_deterministic_algorithms(True, warn_only=True)
        options = Options(bf16=True)
        runs = {
            "uninterrupted": _rollouts(options, 1, ROLLOUTS * STEPS),
            "unpatched": _rollouts(options, ROLLOUTS, STEPS),
        }
        with applied("reentrant-train", settings=SETTINGS):
            runs["patched"] = _rollouts(options, ROLLOUTS, STEPS)
        return device, runs


def test_rollouts_equal_one_uninterrupted_run() -> None:
    # Variables make the rank a fresh process: one that is forked could not use the GPU.
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    [(device, runs)] = spawn_ranks(_compare, 1, env=variables)
    assert device == DEVICE.type
    assert runs["unpatched"].error.startswith("AssertionError: When overlap_grad_reduce is True")
    assert runs["patched"].error == ""
    assert len(runs["patched"].losses) == ROLLOUTS * STEPS
    assert runs["patched"].losses == runs["uninterrupted"].losses
    assert runs["patched"].checksum == runs["uninterrupted"].checksum
    assert runs["patched"].gathers_from_hooks > 0
    assert runs["patched"].reduces_from_hooks > 0
