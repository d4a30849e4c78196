"""Which settings are reported after a call of ``train()``; on real megatron-core, see ``tests/real``."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl_patches.reentry import main_parameters, reentrant_train
from megatron_rl_patches.reentry.training_warnings import reported
from megatron_rl_patches.testing import MockDDP, MockOptimizer

pytestmark = pytest.mark.usefixtures("nothing_reported")


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("shard", [slice(0, 40), slice(7, 23)])
def test_main_parameters_are_compared_as_a_step_rounds_them(
    shard: slice, offloads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this rank does not update does not count, nor what is freed; offloading has copies of its own."""
    monkeypatch.setattr(main_parameters, "_AT_ONCE", 6)
    weight = torch.randn(5, 8).bfloat16()
    part = weight.view(-1)[shard]
    main = part.float()
    optimizer = SimpleNamespace(
        model_float16_groups=[[weight, weight, torch.empty(0).bfloat16()]],
        shard_fp32_from_float16_groups=[[None, None if offloads else main, torch.empty(0)]],
        shard_float16_groups=[[part.clone(), part, None]],
        optimizer=SimpleNamespace(param_to_inner_param={part: main} if offloads else {}),
        _get_model_param_range_map=lambda _: {"param": SimpleNamespace(start=shard.start, end=shard.stop)},
    )

    def differ() -> bool:
        return main_parameters.differ_from_weights(SimpleNamespace(chained_optimizers=[optimizer]))

    main[1] *= 1.0001
    weight[4, 7] = 0.0 if shard.stop < 40 else weight[4, 7]
    part[:2] = main[:2] = torch.tensor([math.nan, math.inf])
    assert not differ()
    part[-1] += 1
    assert differ()
    weight.untyped_storage().resize_(0)
    assert not differ()


@pytest.mark.parametrize(
    ("changes", "is_stale"),
    [
        ({}, True),
        ({"param_gather_dispatched": True}, False),
        ({"param_gather_dispatched": True, "param_gather_handle": object()}, True),
        ({"ddp_config": SimpleNamespace(overlap_param_gather=False)}, False),
        ({"intra_distributed_optimizer_instance_size": 1}, False),
    ],
)
def test_parameters_that_train_left_ungathered(changes: dict[str, Any], is_stale: bool) -> None:
    model = MockDDP()
    for group in model.bucket_groups:
        stale = {"intra_distributed_optimizer_instance_size": 2, "param_gather_dispatched": False}
        vars(group).update(stale | changes)
    adam = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    with reentrant_train(model, optimizer=adam):
        pass
    assert not reported()
    with reentrant_train(model, optimizer=SimpleNamespace(chained_optimizers=[adam])):
        adam.step()
    assert any("overlap_param_gather=True" in message for message in reported()) is is_stale


def test_a_mock_optimizer_steps_too() -> None:
    model = MockDDP()
    with reentrant_train(model, optimizer=(optimizer := MockOptimizer([model]))):
        model()
        model.backward()
        model.finish_grad_sync()
        optimizer.step()
    assert "overlap_param_gather=True" in reported()[0]


def test_the_largest_dropout_of_the_chunks_is_reported() -> None:
    model = [MockDDP(), MockDDP()]
    model[1].config.attention_dropout = 0.2
    with reentrant_train(model):
        pass
    assert [line.split(":")[0] for line in reported()] == ["attention_dropout=0.2"]
