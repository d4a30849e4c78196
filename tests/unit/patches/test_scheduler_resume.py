"""The core of ``scheduler-resume`` on Megatron's scheduler."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pytest import MonkeyPatch

from megatron_rl_patches.engine.call import Call
from megatron_rl_patches.frameworks import optimizer_steps


@pytest.fixture(autouse=True)
def one_process(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")  # or Megatron warns that it cannot tell


def scheduler() -> SimpleNamespace:
    """Megatron's schedule, linear from 1 to 0 in 100 steps."""
    groups = [{"lr": None, "weight_decay": None, "max_lr": 1.0, "min_lr": 0.0}]
    linear = {"lr_decay_style": "linear", "wd_incr_style": "linear"}
    rates = {"init_lr": 0.0, "max_lr": 1.0, "min_lr": 0.0, "start_wd": 0.0, "end_wd": 1.0}
    steps = {"lr_warmup_steps": 0, "lr_decay_steps": 100, "wd_incr_steps": 100}
    module = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    return module.OptimizerParamScheduler(SimpleNamespace(param_groups=groups), **linear, **rates, **steps)


def state_of(schedule: SimpleNamespace) -> tuple[int, float, float]:
    [group] = schedule.optimizer.param_groups
    return schedule.num_steps, round(group["lr"], 6), round(group["weight_decay"], 6)


def load(schedule: SimpleNamespace | None) -> None:
    optimizer_steps.load_checkpoint(Call(lambda opt_param_scheduler: None, (schedule,)))


def initialize(body: Callable[[], Any]) -> Any:
    return optimizer_steps.initialize_model_and_optimizer(Call(body))


def test_a_schedule_stays_where_loading_left_it() -> None:
    loaded, fresh = scheduler(), scheduler()

    def framework() -> str:
        loaded.load_state_dict(loaded.state_dict() | {"num_steps": 28})
        for schedule in (loaded, fresh, None):
            load(schedule)
        loaded.step(increment=28)
        fresh.step(increment=28)
        assert state_of(loaded) == (56, 0.44, 0.56)
        return "model"

    assert initialize(framework) == "model"
    assert state_of(loaded) == (28, 0.72, 0.28)
    assert state_of(fresh) == (0, 1.0, 0.0)

    fresh.step(increment=3)  # later steps count
    assert state_of(fresh) == (3, 0.97, 0.03)


def test_outside_nothing_is_noted() -> None:
    schedule = scheduler()

    def failing() -> None:
        load(schedule)
        raise OSError

    load(schedule)
    initialize(lambda: schedule.step(increment=5))
    assert state_of(schedule)[0] == 5
    with pytest.raises(OSError):
        initialize(failing)
    schedule.step(increment=5)
    initialize(lambda: None)
    assert state_of(schedule)[0] == 10
