"""The fixtures, as a session of somebody who has installed the package sees them."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

SESSION = """
    import torch
    import torch.distributed

    def my_rank():
        return torch.distributed.get_rank()

    def test_cpu(megatron_cpu):
        assert torch.cuda.is_available()
        assert torch.zeros(1, device="cuda").device.type == "cpu"

    def test_mock(mock_ddp):
        ddp = mock_ddp(overlap_param_gather=False)
        assert not ddp.use_forward_hook

    def test_ranks(gloo_ranks):
        assert gloo_ranks(my_rank, 2, timeout=240) == [0, 1]
"""


def test_fixtures(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SESSION)
    result = pytester.runpytest_subprocess(timeout=280)
    result.assert_outcomes(passed=3)


def test_loading_the_plugin_loads_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, megatron_rl_patches.testing.pytest_plugin;"
        "print([name for name in ('torch', 'megatron', 'numpy') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240
    )
    assert run.stdout.strip() == "[]"
