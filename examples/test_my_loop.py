"""Unit tests of a training loop against mocked Megatron, in milliseconds; the last one is on two real ranks.

    pip install pytest
    pytest test_my_loop.py      # or, from the root of a clone: pytest examples/test_my_loop.py

`set_up` and `train` stand for your own module. The rest is what you would write in its tests.
"""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import DistributedDataParallelConfig

import megatron_rl_patches
from megatron_rl_patches.reentry import reentrant_train
from megatron_rl_patches.testing import MockConfig, MockOptimizer

# --- your module


def set_up(chunks, config):
    """Wrap the chunks of a model as Megatron's get_model does."""
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, overlap_param_gather=True, use_distributed_optimizer=True
    )
    model = [DDP(config, ddp_config, chunk, disable_bucketing=n > 0) for n, chunk in enumerate(chunks)]
    for chunk in model:
        chunk.broadcast_params()
    return model


@reentrant_train
def train(model, optimizer, rollout):
    [chunk] = model
    assert chunk.config.no_sync_func is None
    chunk.config.no_sync_func = chunk.no_sync
    chunk.disable_forward_pre_hook(param_sync=False)
    skipped = 0
    for step, batch in enumerate(rollout):
        chunk.zero_grad_buffer()
        chunk(batch).square().mean().backward()
        chunk.finish_grad_sync()
        succeeded, _, _ = optimizer.step()
        skipped += not succeeded
        if step == 0:
            chunk.enable_forward_pre_hook()
    chunk.disable_forward_pre_hook()
    return skipped


# --- its tests


@pytest.fixture
def model(mock_ddp):
    """Run your own set-up code, with the mock in place of the class that it imports."""
    mock_ddp(f"{__name__}.DDP")
    return set_up([torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))], MockConfig())


@pytest.fixture(autouse=True)
def patched():
    """Put the patch in place, as in your job, so that hooks can be disabled twice."""
    with megatron_rl_patches.applied("reentrant-train"):
        yield


ROLLOUT = [torch.ones(2, 4), torch.zeros(2, 4)]


def test_parameters_are_broadcast(model):
    assert model[0].calls == [("broadcast_params", {})]


def test_three_rollouts_never_use_stale_parameters(model):
    optimizer = MockOptimizer(model)
    for _ in range(3):
        assert train(model, optimizer, ROLLOUT) == 0
    assert optimizer.calls == ["step"] * 6
    assert model[0].stale_forwards == 0


def test_gradients_reach_the_optimizer(model):
    train(model, MockOptimizer(model), ROLLOUT[:1])
    assert all(parameter.main_grad.abs().sum() > 0 for parameter in model[0].parameters())


def test_a_skipped_step_is_counted(model):
    assert train(model, MockOptimizer(model, result=(False, None, None)), ROLLOUT) == 2


def test_after_an_exception_the_next_rollout_trains(model):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        train(model, MockOptimizer(model), [torch.ones(2, 3)])
    assert train(model, MockOptimizer(model), ROLLOUT) == 0


@pytest.mark.ranks(2)
def test_own_loop_learns_on_real_ranks(tiny_model):
    tiny, rank = tiny_model("dense"), torch.distributed.get_rank()
    model, optimizer = tiny.build()
    import own_loop  # the example beside this file

    loop = reentrant_train(own_loop.train)
    losses = [loop(model, optimizer, own_loop.generate(tiny, 10 * n + rank)) for n in range(3)]
    assert losses[2] < losses[0]
