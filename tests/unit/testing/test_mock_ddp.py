"""What the mocks keep account of; a contract test in tests/real compares them with Megatron's class."""

from __future__ import annotations

from megatron_rl_patches.testing import MockDDP, MockOptimizer


def test_a_forward_without_hooks_after_a_step_is_stale() -> None:
    ddp = MockDDP()
    ddp.disable_forward_pre_hook(param_sync=False)
    MockOptimizer([ddp]).step()
    ddp()
    assert ddp.stale_forwards == 1


def test_without_overlap_the_optimizer_gathers() -> None:
    ddp = MockDDP(overlap_param_gather=False)
    MockOptimizer([ddp]).step()
    ddp()
    assert ddp.stale_forwards == 0
    assert ddp.calls == [("start_param_sync", {"force_sync": False, "force_dispatch": False})]
