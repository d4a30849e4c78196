"""What the mocks keep account of; a contract test in tests/real compares them with Megatron's class."""

import math
from contextlib import nullcontext

import pytest
import torch

from megatron_rl_patches import Settings, applied
from megatron_rl_patches.errors import NonFiniteGradients
from megatron_rl_patches.testing import MockConfig, MockDDP, MockDDPConfig, MockModule, MockOptimizer


def test_only_a_gather_after_the_step_makes_parameters_fresh() -> None:
    gathered, ddp = MockDDP(overlap_param_gather=False), MockDDP()
    MockOptimizer([gathered]).step()
    gathered()
    assert gathered.stale_forwards == 0
    assert gathered.calls == [("start_param_sync", {"force_sync": False, "force_dispatch": False})]
    ddp.start_param_sync()
    MockOptimizer([ddp]).step()  # while parameters are gathered
    ddp.start_param_sync(force_sync=True)  # which only waits
    ddp.module()
    assert ddp.stale_forwards == 4  # modules with parameters


def test_a_module_of_torch_trains_and_keeps_its_names() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    ddp = MockDDP(module=module)
    ddp(torch.ones(4, 2)).sum().backward()
    assert module[1].bias.grad is None and module[1].bias.main_grad == 4.0
    ddp.finish_grad_sync()
    ddp.scale_gradients(0.5)
    assert module[1].bias.main_grad == 2.0
    ddp.zero_grad_buffer()
    assert module[1].bias.main_grad == 0.0
    ddp.load_state_dict({name: torch.ones_like(value) for name, value in module.state_dict().items()})
    assert ddp.state_dict()["0.weight"].sum() == 6.0


def test_buckets() -> None:
    for groups, options in ((4, {}), (1, {"disable_bucketing": True}), (1, {"overlap_grad_reduce": False})):
        ddp = MockDDP(MockConfig(), MockDDPConfig(), MockModule.tiny(), **options)
        assert len(ddp.bucket_groups) == groups
    frozen = MockModule(MockModule(params=1), MockModule(params=1))
    next(frozen.parameters()).requires_grad = False
    assert len(MockDDP(module=frozen).bucket_groups) == 1
    shared, last = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    last.weight = shared.weight
    ddp = MockDDP(module=torch.nn.Sequential(shared, last))
    assert [len(group.params) for group in ddp.bucket_groups] == [1]
    for _ in range(2):
        ddp.zero_grad_buffer()
        ddp(torch.ones(1, 2)).sum().backward()
        ddp.finish_grad_sync()


def test_optimizer() -> None:
    optimizer = MockOptimizer([MockDDP()])
    assert optimizer.step() == (True, 0.0, None) and optimizer.calls == ["step"]
    assert optimizer.get_loss_scale().item() == 1.0
    optimizer.param_groups[0]["lr"] = 0.1
    state = optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.1
    [part] = optimizer.chained_optimizers
    assert not hasattr(part, "chained_optimizers") and not part.is_stub_optimizer
    for inner in (part, part.optimizer, optimizer.optimizer):
        assert inner.param_groups is optimizer.param_groups and inner.state is optimizer.state
    assert part.config is optimizer.config and part.config.clip_grad == 1.0
    assert MockOptimizer([]).is_stub_optimizer
    assert MockOptimizer([], result=(False, None, None)).step() == (False, None, None)


def test_finite_step_on_a_mock() -> None:
    ddp = MockDDP()
    assert MockOptimizer([ddp], result=(True, math.nan, None)).step()[0]
    assert all(group.is_stale for group in ddp.bucket_groups)
    with applied("finite-step"):
        for success in (True, False):
            ddp = MockDDP()
            updated, norm, _ = MockOptimizer([ddp], result=(success, math.nan, None)).step()
            assert not updated and math.isnan(norm or 0)
            assert not any(group.is_stale for group in ddp.bucket_groups)
    for limit in (0, 1, 3):
        optimizer = MockOptimizer([MockDDP()], result=(False, math.nan, None))
        with applied("finite-step", settings=Settings(finite_step_limit=limit)):
            for _ in range(limit - 1 if limit else 12):
                optimizer.step()
            with pytest.raises(NonFiniteGradients) if limit else nullcontext():
                optimizer.step()


@pytest.mark.parametrize(("distributed", "in_fp32"), [(True, True), (False, False)])
def test_buffers_hold_gradients_and_parameters(distributed: bool, in_fp32: bool) -> None:
    expert, dense = torch.nn.Linear(2, 3).bfloat16(), torch.nn.Linear(3, 1).bfloat16()
    for param in expert.parameters():
        param.allreduce = False  # type: ignore[attr-defined]
    options = {"use_distributed_optimizer": distributed, "grad_reduce_in_fp32": in_fp32}
    ddp = MockDDP(module=torch.nn.Sequential(expert, dense), **options)
    for buffers, module in ((ddp.buffers, dense), (ddp.expert_parallel_buffers, expert)):
        [buffer] = buffers
        assert buffer.params == list(module.parameters())
        module.weight.main_grad += 1  # type: ignore[operator]
        assert buffer.grad_data.sum() == module.weight.numel()
        assert buffer.grad_data.dtype == (torch.float32 if in_fp32 else torch.bfloat16)
        assert (buffer.param_data is not None) is distributed
        if distributed:
            buffer.param_data.fill_(3)
            assert module.bias[0] == 3
