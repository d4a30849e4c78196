"""Every function of ``reentry`` works on ``MockDDP`` with every option, without a process group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from megatron_rl_patches.reentry import forward_pre_hooks, preserved_hooks, reentrant_train
from megatron_rl_patches.testing import MockConfig, MockDDP, MockModule, MockOptimizer

OPTIONS = [
    dict(
        zip(("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer"), flags, strict=True)
    )
    for flags in itertools.product([True, False], repeat=3)
]
OPTIONS += [{"align_param_gather": True}, {"reuse_grad_buf_for_mxfp8_param_ag": True}]


def build(options: dict[str, bool]) -> list[MockDDP]:
    """Two chunks of a virtual pipeline, which share a config; the second one has experts."""
    config = MockConfig()
    experts = MockModule(MockModule(params=1), MockModule(params=2, expert=True))
    return [MockDDP(config=config, **options), MockDDP(experts, config, **options)]


def train(model: Sequence[MockDDP], optimizer: MockOptimizer, steps: int = 2, fail_in: str = "") -> None:
    """Train as slime does; disable and enable forward pre-hooks as ``reentrant-train`` has them."""
    config = model[0].config
    if model[0].ddp_config.overlap_grad_reduce:
        assert config.no_sync_func is None
        config.no_sync_func = [chunk.no_sync for chunk in model]
    for chunk in model:
        chunk.train()
        if chunk.use_forward_hook:
            forward_pre_hooks.disable(chunk.disable_forward_pre_hook, chunk, param_sync=False)
    for _ in range(steps):
        for chunk in model:
            chunk.zero_grad_buffer()
        for chunk in model:
            chunk()
            chunk.backward()
            if fail_in == "backward":
                raise ZeroDivisionError
        for chunk in model:
            chunk.finish_grad_sync()
        optimizer.step()
        if fail_in == "step":
            raise ZeroDivisionError
        for chunk in model:
            if chunk.use_forward_hook:
                forward_pre_hooks.enable(chunk.enable_forward_pre_hook, chunk)
    for chunk in model:
        if chunk.use_forward_hook:
            forward_pre_hooks.disable(chunk.disable_forward_pre_hook, chunk)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("fail_in", ["", "backward", "step"])
def test_rollout_after_rollout(options: dict[str, bool], fail_in: str) -> None:
    assert not dist.is_initialized()
    model = build(options)
    optimizer = MockOptimizer(model)
    guarded = reentrant_train(train)
    guarded(model, optimizer)
    if fail_in:
        with pytest.raises(ZeroDivisionError):
            guarded(model, optimizer, fail_in=fail_in)
    with reentrant_train(model, optimizer=optimizer, timers=object(), config=model[0].config, installs=True):
        train(model, optimizer)
    with preserved_hooks(model):
        pass
    for chunk in model:
        forward_pre_hooks.synchronize(chunk)
        assert chunk.stale_forwards == 0
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            assert not group.is_stale
            assert group.param_gather_handle is None and group.grad_reduce_handle is None
