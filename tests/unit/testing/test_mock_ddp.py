"""What the mocks keep account of; a contract test in tests/real compares them with Megatron's class."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from pytest_mock import MockerFixture

from megatron_rl_patches.testing import MockConfig, MockDDP, MockDDPConfig, MockModule, MockOptimizer


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


def test_a_module_of_torch_trains_and_keeps_its_names() -> None:
    config, ddp_config = MockConfig(), MockDDPConfig()
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    ddp = MockDDP(config, ddp_config, module)
    assert (ddp.config, ddp.ddp_config, ddp.module) == (config, ddp_config, module)
    ddp(torch.ones(4, 2)).sum().backward()
    assert module[1].bias.grad is None and module[1].bias.main_grad == 4.0
    ddp.finish_grad_sync()
    ddp.scale_gradients(0.5)
    assert module[1].bias.main_grad == 2.0
    ddp.zero_grad_buffer()
    assert module[1].bias.main_grad == 0.0
    assert list(ddp.state_dict()) == list(module.state_dict())
    ddp.load_state_dict({name: torch.ones_like(value) for name, value in module.state_dict().items()})
    assert module[0].weight.sum() == 6.0


def test_buckets() -> None:
    assert len(MockDDP().bucket_groups) == 4
    assert len(MockDDP(disable_bucketing=True).bucket_groups) == 1
    assert len(MockDDP(overlap_grad_reduce=False).bucket_groups) == 1
    frozen = MockModule(MockModule(params=1), MockModule(params=1))
    next(frozen.parameters()).requires_grad = False
    assert len(MockDDP(module=frozen).bucket_groups) == 1


@pytest.mark.parametrize("in_fp32", [True, False])
def test_main_grad_has_the_dtype_that_gradients_are_reduced_in(in_fp32: bool) -> None:
    ddp_config = MockDDPConfig(grad_reduce_in_fp32=in_fp32)
    module = torch.nn.Linear(2, 1, bias=False).bfloat16()
    MockDDP(MockConfig(), ddp_config, module)(torch.ones(1, 2).bfloat16()).sum().backward()
    assert module.weight.main_grad.dtype == (torch.float32 if in_fp32 else torch.bfloat16)
    assert module.weight.main_grad.sum() == 2


def test_a_shared_parameter_is_in_one_bucket_group() -> None:
    first, last = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    last.weight = first.weight
    ddp = MockDDP(module=torch.nn.Sequential(first, last))
    assert [len(group.params) for group in ddp.bucket_groups] == [1]
    for _ in range(2):
        ddp.zero_grad_buffer()
        ddp(torch.ones(1, 2)).sum().backward()
        ddp.finish_grad_sync()


def test_optimizer() -> None:
    ddp = MockDDP()
    optimizer = MockOptimizer([ddp])
    assert optimizer.step() == (True, 0.0, None) and optimizer.calls == ["step"]
    assert optimizer.get_loss_scale().item() == 1.0
    optimizer.param_groups[0]["lr"] = 0.1
    state = optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.1
    chunk = MockDDP()
    failing = MockOptimizer([chunk], result=(False, None, None))
    assert failing.step() == (False, None, None)
    assert not any(group.is_stale for group in chunk.bucket_groups)


def test_set_up_code_that_names_the_class(mocker: MockerFixture) -> None:
    setup = ModuleType("setup")
    exec(SETUP, vars(setup))
    mocker.patch.multiple(setup, DDP=MockDDP, DistributedDataParallelConfig=MockDDPConfig)
    model = setup.wrap([MockModule.tiny(), MockModule.tiny()], MockConfig())
    assert [len(chunk.bucket_groups) for chunk in model] == [4, 1]
    assert model[0].calls == [("broadcast_params", {})]


SETUP = """
DDP = DistributedDataParallelConfig = None  # as imported from Megatron

def wrap(chunks, config):
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, overlap_param_gather=True, use_distributed_optimizer=True
    )
    model = [
        DDP(config=config, ddp_config=ddp_config, module=chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for chunk in model:
        chunk.broadcast_params()
    return model
"""
