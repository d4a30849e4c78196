"""The mocks fail in a training loop of the usual shape where Megatron fails."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_rl_patches.testing import MockConfig, MockDDP, MockFloat16Module, MockModule, MockOptimizer


def train(model: Sequence[MockDDP], optimizer: MockOptimizer, steps: int = 2, microbatches: int = 2) -> None:
    """The shape of slime's ``train``."""
    config = model[0].config
    if model[0].ddp_config.overlap_grad_reduce:
        assert config.no_sync_func is None
        config.no_sync_func = [chunk.no_sync for chunk in model]
    overlaps_gather = model[0].use_forward_hook
    if overlaps_gather:
        for chunk in model:
            chunk.disable_forward_pre_hook(param_sync=False)
    for step in range(steps):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        for chunk in model:
            with chunk.no_sync():
                for _ in range(microbatches - 1):
                    chunk()
                    chunk.backward()
            chunk()
            chunk.backward()
            chunk.finish_grad_sync()
        optimizer.step()
        if step == 0 and overlaps_gather:
            for chunk in model:
                chunk.enable_forward_pre_hook()
    if overlaps_gather:
        for chunk in model:
            chunk.disable_forward_pre_hook()


def test_training_once_leaves_nothing_outstanding() -> None:
    model = [MockDDP()]
    train(model, MockOptimizer(model), steps=3)
    for group in model[0].bucket_groups:
        assert group.param_gather_handle is None and group.grad_reduce_handle is None
        assert not group.is_stale and not group.is_first_batch
    assert model[0].stale_forwards == 0
    assert model[0].calls[0] == ("disable_forward_pre_hook", {"param_sync": False})
    assert model[0].calls[-1] == ("start_param_sync", {"force_sync": True, "force_dispatch": False})


def test_training_again_meets_the_upstream_assertion() -> None:
    model = [MockDDP()]
    train(model, MockOptimizer(model))
    with pytest.raises(AssertionError):
        train(model, MockOptimizer(model))


def test_training_again_without_overlapped_reduce_meets_the_upstream_key_error() -> None:
    model = [MockDDP(overlap_grad_reduce=False)]
    train(model, MockOptimizer(model))
    with pytest.raises(KeyError) as error:
        train(model, MockOptimizer(model))
    assert error.value.args == (model[0].module,)


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
