"""Everything that a ``train()`` has changed before it raised is as it was at entry."""

from __future__ import annotations

import enum
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture

from megatron_rl_patches.reentry import guard, reentrant_train, running_calls
from megatron_rl_patches.reentry.timers import INTERVAL_TIMER
from megatron_rl_patches.testing import MockConfig, MockDDP, MockOptimizer

PLAIN = {"overlap_param_gather": False, "use_distributed_optimizer": False}


@contextmanager
def failing(model: Any, **options: Any) -> Iterator[None]:
    with pytest.raises(ZeroDivisionError), reentrant_train(model, **options):
        yield
        raise ZeroDivisionError


def test_functions_and_timers_of_every_config() -> None:
    chunk, framework_config = MockDDP(**PLAIN), MockConfig()
    chunk.config.timers = timers = object()
    with failing(chunk, config=framework_config):
        for config in (chunk.config, framework_config):
            config.no_sync_func, config.grad_sync_func, config.timers = chunk.no_sync, abs, None
    assert vars(chunk.config) == vars(MockConfig(timers=timers))
    assert vars(framework_config) == vars(MockConfig())


def test_attributes_that_were_absent_are_deleted() -> None:
    config = SimpleNamespace(no_sync_func=None)
    chunk = MockDDP(**PLAIN, config=config)  # type: ignore[arg-type]
    del chunk.force_all_reduce
    with failing(chunk):
        config.grad_sync_func = config.timers = abs
        chunk.force_all_reduce = True
    assert vars(config) == {"no_sync_func": None}
    assert not hasattr(chunk, "force_all_reduce")


@pytest.mark.parametrize("reducing", [False, True])
def test_whether_gradients_are_all_reduced(reducing: bool) -> None:
    chunk = MockDDP(**PLAIN)
    chunk.force_all_reduce = reducing
    with failing(chunk):
        chunk.force_all_reduce = not reducing
    assert chunk.force_all_reduce is reducing


def test_the_optimizers_step_that_a_schedule_had_replaced(mocker: MockerFixture) -> None:
    model = [MockDDP(**PLAIN)]
    optimizer = MockOptimizer(model)
    with failing(model, optimizer=optimizer):
        optimizer.step = print  # type: ignore[method-assign,assignment]
    assert "step" not in vars(optimizer)
    mine = mocker.stub()
    optimizer.step = mine  # type: ignore[method-assign]
    with failing(model, optimizer=optimizer):
        optimizer.step = print  # type: ignore[method-assign,assignment]
    assert optimizer.step is mine


def test_the_framework_optimizer_may_be_none_or_have_slots() -> None:
    class Slotted:
        __slots__ = ()

    for optimizer in (None, Slotted()):
        with failing([MockDDP(**PLAIN)], optimizer=optimizer):
            pass


class State(enum.Enum):
    NOT_RUNNING_YET = 0
    RERUNNING = 1


@pytest.fixture
def rerun(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module: Any = ModuleType("megatron.core.rerun_state_machine")
    module._GLOBAL_RERUN_STATE_MACHINE = None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_the_rerun_state_machine(rerun: Any) -> None:
    machine = rerun._GLOBAL_RERUN_STATE_MACHINE = SimpleNamespace(state=State.RERUNNING, mode="reports")
    with failing(MockDDP(**PLAIN)):
        machine.state, machine.mode = State.NOT_RUNNING_YET, "disabled"
    assert (machine.state, machine.mode) == (State.RERUNNING, "reports")


def test_a_rerun_state_machine_that_the_call_has_made(rerun: Any) -> None:
    with failing(MockDDP(**PLAIN)):
        machine = rerun._GLOBAL_RERUN_STATE_MACHINE = SimpleNamespace(state=State.RERUNNING, mode="x")
    assert machine.state is State.NOT_RUNNING_YET


def test_a_clean_up_that_fails_is_logged_and_the_next_one_runs(
    mocker: MockerFixture, caplog: pytest.LogCaptureFixture
) -> None:
    chunk = MockDDP(**PLAIN)
    mocker.patch.object(running_calls, "restore", side_effect=RuntimeError("hook of the framework"))
    reset = mocker.spy(chunk.bucket_groups[0], "reset")
    with caplog.at_level(logging.WARNING), failing(chunk):
        pass
    message = "clean-up after an exception in train() failed: RuntimeError: hook of the framework"
    assert caplog.messages == [message]
    assert reset.call_count == 1


def test_modes_are_restored_module_by_module() -> None:
    """A frozen vision tower that is in eval mode while the rest trains stays in eval mode."""
    evaluating, training, modeless = model = [MockDDP(**PLAIN) for _ in range(3)]
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


class Timer:
    def __init__(self, started: bool) -> None:
        self._started = started

    def reset(self) -> None:
        self._started = False


class Timers:
    def __init__(self, *names: str, running: tuple[str, ...]) -> None:
        self._timers = {name: Timer(name in running) for name in names}

    def running(self) -> set[str]:
        return {name for name, timer in self._timers.items() if timer._started}


@pytest.mark.parametrize("in_config", [False, True])
def test_timers(in_config: bool) -> None:
    timers = Timers(INTERVAL_TIMER, "mine", "evaluate", running=(INTERVAL_TIMER, "mine"))
    model = [MockDDP(**PLAIN), MockDDP(**PLAIN)]
    model[1].config.timers = timers if in_config else Timers(running=())
    with failing(model, timers=None if in_config else timers):
        assert timers.running() == {"mine"}
        timers._timers[INTERVAL_TIMER]._started = timers._timers["evaluate"]._started = True
    assert timers.running() == {"mine", INTERVAL_TIMER}


def test_an_entry_that_fails_changes_nothing(mocker: MockerFixture) -> None:
    chunk = MockDDP(**PLAIN)
    chunk.config.no_sync_func = chunk.no_sync
    chunk.config.timers = timers = Timers(INTERVAL_TIMER, running=(INTERVAL_TIMER,))
    mocker.patch.object(guard, "synchronize_interrupted", side_effect=ZeroDivisionError)
    with pytest.raises(ZeroDivisionError), reentrant_train(chunk):
        pass
    assert chunk.config.no_sync_func == chunk.no_sync
    assert timers.running() == {INTERVAL_TIMER}
