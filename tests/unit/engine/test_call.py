"""What an adapter can ask of a call: arguments by name, the original as called, the original with changes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from megatron_rl_patches import apply
from megatron_rl_patches.engine.call import Call

from .conftest import Framework


def target(model: Any, *rest: Any, steps: int = 1, **more: Any) -> tuple[Any, ...]:
    return model, rest, steps, more


class Trainer:
    def fit(self, model: Any, steps: int = 1) -> tuple[Any, ...]:
        return model, steps


def test_arguments_by_name() -> None:
    call = Call(target, ("m", 2), {"other": 3})
    assert call.arguments == {"model": "m", "rest": (2,), "steps": 1, "more": {"other": 3}}
    assert (call["model"], call["steps"], call.get("optimizer")) == ("m", 1, None)
    assert call.passed() == {"model": "m", "rest": (2,), "more": {"other": 3}}
    assert call.changed() == {"model", "rest", "more"}
    assert Call(Trainer().fit, ("m",)).arguments == {"model": "m", "steps": 1}
    with pytest.raises(KeyError, match="optimizer"):
        call["optimizer"]
    with pytest.raises(TypeError, match="model"):
        Call(target)["model"]


def test_the_original_runs_as_called_or_with_changes() -> None:
    call = Call(target, ("m", 2), {"other": 3})
    for _ in range(2):
        assert call() == ("m", (2,), 1, {"other": 3})
        assert call(steps=5) == ("m", (2,), 5, {"other": 3})
        assert call(model="n") == ("n", (2,), 1, {"other": 3})
    assert Call(Trainer().fit, ("m",))(steps=2) == ("m", 2)
    with pytest.raises(TypeError, match="has no parameter modle"):
        Call(Trainer().fit, ("m",))(modle="n")


def test_reading_arguments_does_not_keep_the_instance(tagged: Framework) -> None:
    package = tagged("Trainer.step", adapter=lambda call: call["x"])
    apply()
    trainer = package.model.Trainer()
    assert trainer.step(3) == 3
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None
