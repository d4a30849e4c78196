"""Guarded calls that are nested, or that overlap in two threads or two generators."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl_patches.frameworks.training import bridge_update_model_config_funcs
from megatron_rl_patches.reentry import TrainGuard, reentrant_train
from megatron_rl_patches.reentry.timers import INTERVAL_TIMER
from megatron_rl_patches.testing import MockConfig, MockDDP

from .test_guard_state import State, Timers, rerun

__all__ = ["rerun"]  # a fixture
PLAIN = {"overlap_param_gather": False, "use_distributed_optimizer": False}


class DistributedDataParallel(MockDDP):
    """The guard knows data-parallel chunks by the name of their class."""


def two_models(config: Any) -> list[Any]:
    return [DistributedDataParallel(config, **PLAIN) for _ in range(2)]


@reentrant_train
def train(model: Any, within: Callable[[], Any] = lambda: None, fails: bool = False) -> None:
    """A loop of the shape that all frameworks share, which does something else after it has begun."""
    config = model.config
    config.grad_scale_func = scale = object()
    assert config.no_sync_func is None
    config.no_sync_func = model.no_sync
    within()
    assert config.no_sync_func == model.no_sync
    assert config.grad_scale_func is scale
    if fails:
        raise ZeroDivisionError


def test_a_nested_call_leaves_the_functions_of_the_outer_one() -> None:
    config = MockConfig()
    actor, critic = two_models(config)

    def nested() -> None:
        with pytest.raises(AssertionError):
            train(critic)

    for _ in range(2):
        train(actor, within=nested)
        train(critic)
    train(actor, within=lambda: train(two_models(MockConfig())[0]))  # on a config of its own it trains


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("installs", [True, False])
def test_functions_that_a_nested_call_replaces_are_put_back(installs: bool, fails: bool) -> None:
    """The outer call may have found them, if it installs none itself."""
    config = MockConfig()
    actor, critic = two_models(config)
    functions = {"no_sync_func": actor.no_sync, "finalize_model_grads_func": print, "grad_scale_func": abs}
    vars(config).update(functions)
    with reentrant_train(actor, installs=installs):
        vars(config).update(functions)
        with suppress(ZeroDivisionError), reentrant_train(critic, installs=installs):
            assert config.no_sync_func == actor.no_sync
            config.no_sync_func = critic.no_sync
            config.finalize_model_grads_func = config.grad_scale_func = max
            if fails:
                raise ZeroDivisionError
        assert vars(config).items() >= functions.items()


@pytest.mark.parametrize("in_threads", [False, True])
def test_calls_within_a_guarded_program_follow_each_other(in_threads: bool) -> None:
    """What a nested call has left belongs to no call that still runs, so the next one may clear it."""

    def run(*args: Any, **kwargs: Any) -> None:
        def call() -> None:
            with suppress(ZeroDivisionError):
                train(*args, **kwargs)
            done.append(args)

        (in_thread if in_threads else (lambda call: call()))(call)

    config, done = MockConfig(), []
    actor, critic = two_models(config)
    timers = config.timers = Timers(INTERVAL_TIMER, running=())

    def start_interval_timer() -> None:
        assert not timers.running()
        timers._timers[INTERVAL_TIMER]._started = True

    with reentrant_train([actor, critic]):
        for fails in (False, True, False):
            run(actor, start_interval_timer, fails=fails)
            run(critic, start_interval_timer, fails=fails)
    assert len(done) == 6


def test_the_interval_timer_of_the_outer_call_goes_on() -> None:
    timers = Timers(INTERVAL_TIMER, running=())
    with reentrant_train(MockDDP(**PLAIN), timers=timers):
        timers._timers[INTERVAL_TIMER]._started = True
        with reentrant_train(MockDDP(**PLAIN), timers=timers):
            assert timers.running() == {INTERVAL_TIMER}


def in_thread(body: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors == []


class Overlapping:
    """Guarded calls that begin and end at any time, each in a generator or in a thread of its own."""

    def __init__(self, in_threads: bool) -> None:
        self._run = in_thread if in_threads else (lambda step: step())

    def begin(self, model: Any, body: Callable[[], Any] = lambda: None, **options: Any) -> Iterator[None]:
        def call() -> Iterator[None]:
            with reentrant_train(model, **options):
                body()
                yield

        running = call()
        self._run(lambda: next(running))
        return running

    def end(self, running: Any, fails: bool = False) -> None:
        def step() -> None:
            with suppress(ZeroDivisionError, StopIteration):
                running.throw(ZeroDivisionError()) if fails else next(running)

        self._run(step)


@pytest.fixture(params=[False, True], ids=["generators", "threads"])
def overlapping(request: pytest.FixtureRequest) -> Overlapping:
    return Overlapping(request.param)


@contextmanager
def collecting(enabled: bool) -> Iterator[None]:
    try:
        (gc.enable if enabled else gc.disable)()
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("first_to_end", [0, 1])
@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_as_before_both(
    overlapping: Overlapping, enabled: bool, first_to_end: int, fails: bool
) -> None:
    with collecting(enabled):
        change = gc.disable if enabled else gc.enable
        calls = [overlapping.begin(MockDDP(**PLAIN), change) for _ in range(2)]
        overlapping.end(calls.pop(first_to_end), fails)
        assert gc.isenabled() is not enabled
        overlapping.end(calls.pop())
        assert gc.isenabled() is enabled


@pytest.mark.parametrize("first_fails", [False, True])
def test_a_later_call_puts_back_what_the_first_one_found(
    overlapping: Overlapping, rerun: Any, first_fails: bool
) -> None:
    machine = rerun._GLOBAL_RERUN_STATE_MACHINE = SimpleNamespace(state=State.NOT_RUNNING_YET, mode="reports")
    timers = Timers("forward", "backward", running=())
    first, second = two_models(MockConfig(timers=timers))
    second.module = first.module  # they share a trunk
    trunk = first.module.train()

    def change() -> None:
        machine.state = State.RERUNNING
        timers._timers["forward"]._started = True
        trunk.eval()

    calls = [overlapping.begin(model, change) for model in (first, second)]
    timers._timers["backward"]._started = True
    overlapping.end(calls[0], first_fails)
    assert machine.state is State.RERUNNING  # the second call still runs
    assert timers.running() == {"forward", "backward"}
    assert not trunk.training
    overlapping.end(calls[1], fails=not first_fails)
    assert machine.state is State.NOT_RUNNING_YET
    assert timers.running() == set()
    assert trunk.training


def test_a_call_that_fails_leaves_the_functions_of_the_other(overlapping: Overlapping) -> None:
    """In whichever order they begin and end."""
    for fails in (0, 1):
        config = MockConfig()
        models = two_models(config)
        calls = [overlapping.begin(model) for model in models]
        config.no_sync_func = models[1 - fails].no_sync
        overlapping.end(calls[fails], fails=True)
        assert config.no_sync_func == models[1 - fails].no_sync
        overlapping.end(calls[1 - fails])


def test_a_guard_may_be_entered_twice() -> None:
    guard = TrainGuard(MockDDP(**PLAIN))
    with collecting(True), guard:
        gc.disable()
        with guard:
            gc.enable()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_setting_up_another_model_leaves_the_functions_of_a_call_that_runs() -> None:
    config = MockConfig()
    actor, critic = two_models(config)
    with reentrant_train(actor):
        config.no_sync_func = actor.no_sync
        bridge_update_model_config_funcs(_SetUp(model=[critic], model_config=config))  # type: ignore[arg-type]
        assert config.no_sync_func == actor.no_sync
    bridge_update_model_config_funcs(_SetUp(model=[critic], model_config=config))  # type: ignore[arg-type]
    assert config.no_sync_func is None


class _SetUp(dict[str, Any]):
    """Stands for the call of a function that does nothing."""

    def __call__(self) -> None: ...
