"""Guarded calls that are nested, or that overlap in two threads or two generators."""

import copy
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from pytest import FixtureRequest

from megatron_rl_patches.engine.call import Call
from megatron_rl_patches.frameworks.training import bridge_update_model_config_funcs
from megatron_rl_patches.reentry import TrainGuard, reentrant_train
from megatron_rl_patches.reentry.running_calls import INTERVAL_TIMER, METHODS
from megatron_rl_patches.testing import MockConfig, MockDDP
from tests.worlds import guarded
from tests.worlds.guarded import DistributedDataParallel, State, Timers, two_models

train = reentrant_train(guarded.train)


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


def here(body: Callable[[], Any]) -> None:
    body()


def in_thread(body: Callable[[], Any]) -> None:
    with ThreadPoolExecutor() as pool:
        pool.submit(body).result()


@pytest.mark.parametrize("run", [here, in_thread])
def test_calls_in_a_guarded_program_follow_each_other(run: Callable[[Any], None]) -> None:
    """What a nested call has left belongs to no call that still runs, so the next one may clear it."""
    timers, done = Timers(), []
    actor, critic = two_models(MockConfig(timers=timers))

    def start_interval_timer() -> None:
        assert not timers.running()
        timers.start()

    def call(model: Any, fails: bool) -> None:
        with suppress(ZeroDivisionError):
            train(model, within=start_interval_timer, fails=fails)
        done.append(model)

    with reentrant_train([actor, critic]):
        for fails in (False, True, False):
            for model in (actor, critic):
                run(lambda model=model, fails=fails: call(model, fails))
    assert len(done) == 6


class Overlapping:
    """Guarded calls that begin and end at any time, each in a generator or in a thread of its own."""

    def __init__(self, run: Callable[[Callable[[], Any]], None]) -> None:
        self._run = run

    def begin(self, model: Any, body: Callable[[], Any] = lambda: None) -> Iterator[None]:
        def call() -> Iterator[None]:
            with reentrant_train(model):
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


@pytest.fixture(params=[here, in_thread])
def overlapping(request: FixtureRequest) -> Overlapping:
    return Overlapping(request.param)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_hooks_are_switched_in_any_order_in_guarded_calls_alone(
    overlapping: Overlapping, first: int, fails: bool
) -> None:
    """This needs no patch; calls on the same chunk may end in any order."""
    chunk, other = MockDDP(), MockDDP()

    def loop() -> None:
        chunk.disable_forward_pre_hook(False)
        for method in (chunk.disable_forward_pre_hook, chunk.enable_forward_pre_hook):
            method()
            method()
        copied = copy.deepcopy(chunk)
        assert copied.enable_forward_pre_hook.args[-1] is copied  # type: ignore[attr-defined]
        for elsewhere in (other.enable_forward_pre_hook, partial(in_thread, chunk.enable_forward_pre_hook)):
            with pytest.raises(AssertionError):
                elsewhere()

    calls = [overlapping.begin(chunk, loop) for _ in range(2)]
    for call in (calls[first], calls[1 - first]):
        overlapping.end(call, fails)
    assert not vars(chunk).keys() & METHODS.keys()
    with pytest.raises(AssertionError):
        chunk.enable_forward_pre_hook()


@pytest.fixture
def collecting() -> Iterator[None]:
    """Whatever the calls of the test leave behind."""
    gc.enable()
    yield
    gc.enable()


@pytest.mark.usefixtures("collecting")
@pytest.mark.parametrize("first_fails", [False, True])
def test_the_last_call_puts_back_the_first(overlapping: Overlapping, rerun: Any, first_fails: bool) -> None:
    machine = rerun._GLOBAL_RERUN_STATE_MACHINE = SimpleNamespace(state=State.NOT_RUNNING_YET, mode="reports")
    timers = Timers("forward", "backward")
    first, second = two_models(MockConfig(timers=timers))
    second.module = first.module  # they share a trunk
    trunk = first.module.train()

    def change() -> None:
        machine.state = State.RERUNNING
        timers.start("forward")
        trunk.eval()
        gc.disable()

    calls = [overlapping.begin(model, change) for model in (first, second)]
    timers.start("backward")
    overlapping.end(calls[0], first_fails)
    assert machine.state is State.RERUNNING  # the second call still runs
    assert timers.running() == {"forward", "backward"}
    assert not trunk.training and not gc.isenabled()
    overlapping.end(calls[1], fails=not first_fails)
    assert machine.state is State.NOT_RUNNING_YET
    assert timers.running() == set()
    assert trunk.training and gc.isenabled()


@pytest.mark.parametrize("fails", [0, 1])
def test_a_call_that_fails_leaves_the_functions_of_the_other(overlapping: Overlapping, fails: int) -> None:
    """In whichever order they begin and end."""
    config = MockConfig()
    models = two_models(config)
    calls = [overlapping.begin(model) for model in models]
    config.no_sync_func = models[1 - fails].no_sync
    overlapping.end(calls[fails], fails=True)
    assert config.no_sync_func == models[1 - fails].no_sync
    overlapping.end(calls[1 - fails])


@pytest.mark.usefixtures("collecting")
def test_a_guard_may_be_entered_twice() -> None:
    timers = Timers()
    guard = TrainGuard(DistributedDataParallel(), timers=timers)
    with guard:
        timers.start()
        gc.disable()
        with guard:
            assert timers.running() == {INTERVAL_TIMER}  # that of the outer call goes on
            gc.enable()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_setting_up_another_model_leaves_the_functions_of_a_call_that_runs() -> None:
    config = MockConfig()
    actor, critic = two_models(config)
    set_up = Call(lambda model, model_config: None, ([critic], config))
    with reentrant_train(actor):
        config.no_sync_func = actor.no_sync
        bridge_update_model_config_funcs(set_up)
        assert config.no_sync_func == actor.no_sync
    bridge_update_model_config_funcs(set_up)
    assert config.no_sync_func is None
