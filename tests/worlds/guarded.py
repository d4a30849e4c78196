"""Guarded calls of a training loop on ``MockDDP``, and what Megatron keeps beside the model."""

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl_patches.reentry import reentrant_train
from megatron_rl_patches.reentry.running_calls import INTERVAL_TIMER
from megatron_rl_patches.testing import MockConfig, MockDDP


class DistributedDataParallel(MockDDP):
    """A chunk of Megatron's name, without overlap: the guard knows chunks by the name of their class."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config, overlap_param_gather=False, use_distributed_optimizer=False)


def two_models(config: MockConfig | None = None) -> list[Any]:
    config = config or MockConfig()
    return [DistributedDataParallel(config) for _ in range(2)]


def train(
    model: Any, optimizer: Any = None, within: Callable[[], Any] = lambda: None, fails: bool = False
) -> None:
    """Train in the shape that all frameworks share, and do something else after it has begun."""
    chunk = model[0] if isinstance(model, list) else model
    config = chunk.config
    config.grad_scale_func = scale = object()
    assert config.no_sync_func is None, "When overlap_grad_reduce is True, config.no_sync_func must be None"
    config.no_sync_func = chunk.no_sync
    chunk.train()
    within()
    assert config.no_sync_func == chunk.no_sync
    assert config.grad_scale_func is scale
    if fails:
        raise ZeroDivisionError


@contextmanager
def failing(model: Any, **options: Any) -> Iterator[None]:
    """Guard the block, and end it with an exception."""
    with pytest.raises(ZeroDivisionError), reentrant_train(model, **options):
        yield
        raise ZeroDivisionError


class Timers:
    """Stands for ``megatron.core.timers.Timers``."""

    def __init__(self, *names: str, running: tuple[str, ...] = ()) -> None:
        self._timers = {name: SimpleNamespace(_started=name in running) for name in (INTERVAL_TIMER, *names)}
        for timer in self._timers.values():
            timer.reset = lambda timer=timer: vars(timer).update(_started=False)

    def start(self, *names: str) -> None:
        for name in names or (INTERVAL_TIMER,):
            self._timers[name]._started = True

    def running(self) -> set[str]:
        return {name for name, timer in self._timers.items() if timer._started}


class State(enum.Enum):
    """States of Megatron's rerun state machine."""

    NOT_RUNNING_YET = 0
    RERUNNING = 1
