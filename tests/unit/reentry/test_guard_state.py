"""Everything that a ``train()`` has changed before it raised is as it was at entry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture

from megatron_rl_patches.reentry import guard, reentrant_train
from megatron_rl_patches.reentry.timers import INTERVAL_TIMER
from megatron_rl_patches.testing import MockConfig, MockOptimizer
from tests.worlds.guarded import DistributedDataParallel, State, Timers, failing, two_models


def test_functions_and_timers_of_every_config() -> None:
    chunk, framework_config = DistributedDataParallel(), MockConfig()
    chunk.config.timers = timers = object()
    with failing(chunk, config=framework_config):
        for config in (chunk.config, framework_config):
            config.no_sync_func, config.grad_sync_func, config.timers = chunk.no_sync, abs, None
    assert vars(chunk.config) == vars(MockConfig(timers=timers))
    assert vars(framework_config) == vars(MockConfig())


def test_attributes_that_were_absent_are_deleted() -> None:
    config = SimpleNamespace(no_sync_func=None)
    chunk: Any = DistributedDataParallel(config)
    del chunk.force_all_reduce
    with failing(chunk):
        config.grad_sync_func = config.timers = abs
        chunk.force_all_reduce = True
    assert vars(config) == {"no_sync_func": None}
    assert not hasattr(chunk, "force_all_reduce")


@pytest.mark.parametrize("reducing", [False, True])
def test_whether_gradients_are_all_reduced(reducing: bool) -> None:
    chunk = DistributedDataParallel()
    chunk.force_all_reduce = reducing
    with failing(chunk):
        chunk.force_all_reduce = not reducing
    assert chunk.force_all_reduce is reducing


def test_the_optimizers_step_that_a_schedule_had_replaced(mocker: MockerFixture) -> None:
    chunk = DistributedDataParallel()
    optimizer: Any = MockOptimizer([chunk])
    with failing(chunk, optimizer=optimizer):
        optimizer.step = print
    assert "step" not in vars(optimizer)
    optimizer.step = mine = mocker.stub()
    with failing(chunk, optimizer=optimizer):
        optimizer.step = print
    assert optimizer.step is mine
    for without_step in (None, type("Slotted", (), {"__slots__": ()})()):
        with failing(chunk, optimizer=without_step):
            pass


def test_the_rerun_state_machine(rerun: Any) -> None:
    chunk = DistributedDataParallel()
    with failing(chunk):
        machine = rerun._GLOBAL_RERUN_STATE_MACHINE = SimpleNamespace(state=State.RERUNNING, mode="reports")
    assert machine.state is State.NOT_RUNNING_YET  # this call has made it
    machine.state = State.RERUNNING
    with failing(chunk):
        machine.state, machine.mode = State.NOT_RUNNING_YET, "disabled"
    assert (machine.state, machine.mode) == (State.RERUNNING, "reports")


def test_modes_are_restored_module_by_module() -> None:
    """A frozen vision tower that is in eval mode while the rest trains stays in eval mode."""
    evaluating, training, modeless = model = [DistributedDataParallel() for _ in range(3)]
    evaluating.eval()
    vision_tower = next(training.module.children())
    vision_tower.eval()
    del modeless.training
    with failing(model):
        evaluating.train()
        training.eval()
    assert not any(module.training for module in evaluating.modules())
    assert all(module.training is not (module is vision_tower) for module in training.modules())
    assert not hasattr(modeless, "training")


@pytest.mark.parametrize("in_config", [False, True])
def test_timers(in_config: bool) -> None:
    timers = Timers("mine", "evaluate", running=(INTERVAL_TIMER, "mine"))
    model = [DistributedDataParallel() for _ in range(2)]
    model[1].config.timers = timers if in_config else Timers()
    with failing(model, timers=None if in_config else timers):
        assert timers.running() == {"mine"}
        timers.start(INTERVAL_TIMER, "evaluate")
    assert timers.running() == {"mine", INTERVAL_TIMER}


def test_an_entry_that_fails_changes_nothing(mocker: MockerFixture) -> None:
    timers = Timers(running=(INTERVAL_TIMER,))
    chunk, _ = two_models(MockConfig(timers=timers))
    chunk.config.no_sync_func = chunk.no_sync
    mocker.patch.object(guard, "synchronize_interrupted", side_effect=ZeroDivisionError)
    with pytest.raises(ZeroDivisionError), reentrant_train(chunk):
        pass
    assert chunk.config.no_sync_func == chunk.no_sync
    assert timers.running() == {INTERVAL_TIMER}
