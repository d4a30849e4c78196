"""What the mocks keep account of; a contract test in tests/real compares them with Megatron's class."""

from __future__ import annotations

from megatron_rl_patches.testing import MockConfig, MockDDP, MockFloat16Module, MockModule, MockOptimizer


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


def test_chunks_share_a_config_and_experts_have_groups_of_their_own() -> None:
    config = MockConfig()
    body = MockFloat16Module(MockModule(MockModule(params=1), MockModule(params=3, expert=True)))
    chunks = [MockDDP(body, config), MockDDP(config=config)]
    assert chunks[0].config is chunks[1].config
    assert [len(group.params) for group in chunks[0].expert_parallel_bucket_groups] == [3]
    assert len(chunks[0].bucket_groups) == 1
    assert list(chunks[0].modules())[:2] == [chunks[0], body]
    assert set(chunks[0].remove_forward_pre_hook_handles) == set(body.modules())


def test_mode_reaches_every_module() -> None:
    ddp = MockDDP()
    ddp.eval()
    assert not any(module.training for module in ddp.modules())
    ddp.train()
    assert all(module.training for module in ddp.modules())
