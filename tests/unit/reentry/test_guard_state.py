"""What a ``train()`` that raised has changed is as it was at entry: piece by piece."""

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

from megatron_rl_patches.reentry import guard, reentrant_train
from megatron_rl_patches.testing import MockDDP, MockOptimizer
from megatron_rl_patches.testing.mock_modules import MockConfig

PLAIN = {"overlap_param_gather": False, "use_distributed_optimizer": False}


@contextmanager
def failing(model: Any, **options: Any) -> Iterator[None]:
    with pytest.raises(ZeroDivisionError), reentrant_train(model, **options):
        yield
        raise ZeroDivisionError


def test_functions_and_timers_of_every_config() -> None:
    chunk, of_the_host = MockDDP(**PLAIN), MockConfig()
    chunk.config.timers = timers = object()
    with failing(chunk, config=of_the_host):
        for config in (chunk.config, of_the_host):
            config.no_sync_func, config.grad_sync_func, config.timers = chunk.no_sync, abs, None
    assert vars(chunk.config) == vars(MockConfig(timers=timers))
    assert vars(of_the_host) == vars(MockConfig())


def test_a_stale_function_of_the_hosts_own_config_is_cleared_at_entry() -> None:
    chunk, of_the_host = MockDDP(**PLAIN), MockConfig()
    of_the_host.no_sync_func = chunk.no_sync
    with reentrant_train(chunk, config=of_the_host):
        assert of_the_host.no_sync_func is None
        of_the_host.no_sync_func = chunk.no_sync


def test_what_was_not_there_is_not_there() -> None:
    config = SimpleNamespace(no_sync_func=None)
    chunk = MockDDP(**PLAIN, config=config)  # type: ignore[arg-type]
    del chunk.force_all_reduce
    with failing(chunk):
        config.grad_sync_func = config.timers = abs
        chunk.force_all_reduce = True
    assert vars(config) == {"no_sync_func": None}
    assert not hasattr(chunk, "force_all_reduce")


def test_training_mode_of_chunks_that_have_one() -> None:
    evaluating, training, modeless = (MockDDP(**PLAIN) for _ in range(3))
    evaluating.eval()
    del modeless.training
    with failing([evaluating, training, modeless]):
        evaluating.train()
        training.eval()
    assert (evaluating.training, training.training) == (False, True)
    assert not hasattr(modeless, "training")


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


def test_the_host_optimizer_may_be_none_or_have_slots() -> None:
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


class Timer:
    def __init__(self) -> None:
        self._started = False

    def reset(self) -> None:
        self._started = False


def test_timers_are_found_on_the_config_that_has_some() -> None:
    timers = SimpleNamespace(_timers={guard.INTERVAL_TIMER: Timer(), "forward": Timer()})
    model = [MockDDP(**PLAIN), MockDDP(**PLAIN)]
    model[1].config.timers = timers
    timers._timers[guard.INTERVAL_TIMER]._started = True
    with failing(model):
        assert not timers._timers[guard.INTERVAL_TIMER]._started
        timers._timers["forward"]._started = True
    assert not timers._timers["forward"]._started


def test_a_clean_up_that_fails_is_told_and_the_next_is_done(
    mocker: MockerFixture, caplog: pytest.LogCaptureFixture
) -> None:
    chunk = MockDDP(**PLAIN)
    mocker.patch.object(chunk, "train", side_effect=RuntimeError("hook of the host"))
    reset = mocker.spy(chunk.bucket_groups[0], "reset")
    with caplog.at_level(logging.WARNING), failing(chunk):
        chunk.training = False
    assert caplog.messages == ["cleaning up after it failed: RuntimeError: hook of the host"]
    assert reset.call_count == 1


class Trainer:
    def train(self, model: Any) -> None:
        model[0].config.no_sync_func = model[0].no_sync


def test_a_method_may_install() -> None:
    assert guard.installs_sync_functions(Trainer().train)
    assert guard.installs_sync_functions(Trainer.train)
    assert not guard.installs_sync_functions(len)
