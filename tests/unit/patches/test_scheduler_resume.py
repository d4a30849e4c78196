"""The core of ``scheduler-resume`` on Megatron's scheduler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_rl_patches.engine.call import Call
from megatron_rl_patches.frameworks.optimizer_steps import initialize_model_and_optimizer, load_checkpoint


@pytest.fixture
def schedules(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """Two schedules of Megatron's, linear from 1 to 0 in 100 steps."""
    monkeypatch.setenv("RANK", "0")  # or Megatron warns that it cannot tell
    linear = {"lr_decay_style": "linear", "wd_incr_style": "linear"}
    rates = {"init_lr": 0.0, "max_lr": 1.0, "min_lr": 0.0, "start_wd": 0.0, "end_wd": 1.0}
    steps = {"lr_warmup_steps": 0, "lr_decay_steps": 100, "wd_incr_steps": 100}
    make = pytest.importorskip("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
    group = {"lr": None, "weight_decay": None, "max_lr": 1.0, "min_lr": 0.0}
    optimizers = [SimpleNamespace(param_groups=[{**group}]) for _ in range(2)]
    return [make(optimizer, **linear, **rates, **steps) for optimizer in optimizers]


def state_of(schedule: SimpleNamespace) -> tuple[int, float, float]:
    [group] = schedule.optimizer.param_groups
    return schedule.num_steps, round(group["lr"], 6), round(group["weight_decay"], 6)


def load(schedule: SimpleNamespace | None) -> None:
    load_checkpoint(Call(lambda opt_param_scheduler: None, (schedule,)))


def test_a_schedule_stays_where_loading_left_it(schedules: list[SimpleNamespace]) -> None:
    loaded, fresh = schedules

    def framework() -> str:
        loaded.load_state_dict(loaded.state_dict() | {"num_steps": 28})
        for schedule in (loaded, fresh, None):
            load(schedule)
        for schedule in schedules:
            schedule.step(increment=28)
        assert state_of(loaded) == (56, 0.44, 0.56)
        return "model"

    assert initialize_model_and_optimizer(Call(framework)) == "model"
    assert [state_of(loaded), state_of(fresh)] == [(28, 0.72, 0.28), (0, 1.0, 0.0)]
    fresh.step(increment=3)  # later steps count
    assert state_of(fresh) == (3, 0.97, 0.03)


def test_outside_nothing_is_noted(schedules: list[SimpleNamespace]) -> None:
    schedule, _ = schedules

    def failing() -> None:
        load(schedule)
        raise OSError

    load(schedule)
    initialize_model_and_optimizer(Call(lambda: schedule.step(increment=5)))
    assert state_of(schedule)[0] == 5
    with pytest.raises(OSError):
        initialize_model_and_optimizer(Call(failing))
    schedule.step(increment=5)
    initialize_model_and_optimizer(Call(lambda: None))
    assert state_of(schedule)[0] == 10
