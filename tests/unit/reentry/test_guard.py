"""One call of a train-like function, against mocked DDP: what is refused, and what it leaves as it was."""

import gc
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from pytest import LogCaptureFixture
from pytest_mock import MockerFixture

from megatron_rl_patches import MegatronRLPatchesError, status
from megatron_rl_patches.reentry import guard, recovery, reentrant_train, running_calls
from megatron_rl_patches.reentry.running_calls import INTERVAL_TIMER
from megatron_rl_patches.testing import MockConfig, MockDDP, MockOptimizer
from tests.worlds.guarded import DistributedDataParallel, State, Timers, failing, train, two_models


@pytest.fixture
def model() -> list[Any]:
    return [DistributedDataParallel()]


@pytest.mark.parametrize("installs", [True, False])
def test_a_decorated_function_takes_options(model: list[Any], installs: bool) -> None:
    """One that relies on what others installed keeps it."""
    config = MockConfig(no_sync_func=model[0].no_sync)
    seen = []

    def fit(model: Any) -> None:
        seen.append(config.no_sync_func)

    reentrant_train(fit, config=config, installs=installs)(model)
    assert seen == [None if installs else model[0].no_sync]


@pytest.mark.parametrize("is_stale", [False, True])
def test_bodies_without_install_warn(model: list[Any], is_stale: bool, caplog: LogCaptureFixture) -> None:
    config, function = model[0].config, DistributedDataParallel().no_sync if is_stale else model[0].no_sync
    config.no_sync_func = function
    with reentrant_train(model):
        pass
    assert config.no_sync_func == (None if is_stale else function)
    assert ("Gradients were reduced after every microbatch" in caplog.text) is not is_stale


def test_failing_clean_ups_log(model: list[Any], mocker: MockerFixture, caplog: LogCaptureFixture) -> None:
    mocker.patch.object(running_calls, "restore", side_effect=RuntimeError("hook of the framework"))
    mocker.patch.object(model[0].bucket_groups[0], "reset", side_effect=RuntimeError("peer is gone"))
    reset = mocker.spy(model[0].bucket_groups[1], "reset")
    with failing(model):
        pass
    assert [message.partition(". ")[0] for message in caplog.messages] == [
        "megatron_rl_patches: clean-up after an exception in train() failed: "
        "RuntimeError: hook of the framework",
        "megatron_rl_patches: recovering a bucket group failed after an exception in train(): "
        "RuntimeError: peer is gone",
    ]
    assert reset.call_count == 1


def test_without_overlap_an_interrupted_update_is_gathered_at_the_next_entry() -> None:
    chunk = MockDDP(overlap_param_gather=False)
    with failing(chunk):
        chunk.finish_grad_sync()
        for group in chunk.bucket_groups:
            group.is_stale = True
    with reentrant_train(chunk):
        assert not any(group.is_stale for group in chunk.bucket_groups)
    chunk.calls.clear()
    with reentrant_train(chunk):
        pass
    assert chunk.calls == []


def test_mxfp8_is_staged_before_it_is_gathered(mocker: MockerFixture) -> None:
    chunk = MockDDP(reuse_grad_buf_for_mxfp8_param_ag=True)
    order: list[str] = []
    for group in chunk.bucket_groups:
        mocker.patch.object(group, "start_param_sync", side_effect=lambda: order.append("gather"))
    part = SimpleNamespace(_copy_main_params_to_param_buffer=lambda: order.append("stage"))
    chained = SimpleNamespace(chained_optimizers=(part, part))
    new = SimpleNamespace(
        prepare_model_params_for_param_sync=lambda: order.append("prepare"), **vars(chained)
    )
    recovery.recover([chunk], ZeroDivisionError())
    with pytest.raises(MegatronRLPatchesError, match="pass the optimizer"), reentrant_train(chunk):
        pass
    for optimizer, staging in ((chained, ["stage"] * 2), (new, ["prepare"])):
        with failing(chunk, optimizer=optimizer):
            gathers = order[len(staging) :]
            assert order == staging + gathers and set(gathers) == {"gather"}
        order.clear()


class Trainer:
    """Its instances are callable, and keep what they were called with."""

    def __init__(self) -> None:
        self.config = "not that of a model"

    def __call__(self, model: list[MockDDP], optimizer: Any = None) -> None:
        train(model)


def test_partials_and_callable_objects(model: list[Any]) -> None:
    bound = (partial(train, model=model),)
    trainer, fails = Trainer(), partial(partial(train, optimizer=None), fails=False)
    for target in (partial(train), fails, trainer, trainer.__call__, partial(trainer), *bound):
        model[0].config.no_sync_func = None
        for _ in range(2):
            reentrant_train(target)(*[model] * (target not in bound))
        assert model[0].config.no_sync_func == model[0].no_sync


def test_the_context_manager_takes_one_chunk_or_any_container(model: list[Any]) -> None:
    for target in (model, model[0], (*model,), dict.fromkeys(model).keys()):
        with reentrant_train(target):
            train(model)
    for nothing in (None, []):
        with failing(nothing):
            pass


class Fitter:
    def __call__(self, chunks: Any) -> None: ...


def batches(model: Any) -> Any:
    yield


async def fit_later(model: Any) -> None: ...


async def stream(model: Any) -> Any:
    yield


class Batches:
    def __call__(self, model: Any) -> Any:
        yield


NO_MODEL = " has no parameter named 'model' .*; use 'with .*:' inside it instead$"


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([lambda chunks: None], rf"<lambda>\(chunks\){NO_MODEL}"),
        ([partial(train, [])], rf"train\(.*{NO_MODEL}"),
        ([lambda *model: None, lambda **model: None], rf"<lambda>\(\*.*{NO_MODEL}"),
        ([Fitter()], rf"Fitter.__call__\(chunks: .*{NO_MODEL}"),
        ([max], r"^max has no signature.*; use 'with .*:' inside it"),
        ([Trainer], "Trainer is a class"),
        ([batches, fit_later, stream, partial(batches), Batches()], "runs after the call; use 'with ree"),
        ([5, "x", object(), [5], {"model": "x"}, classmethod(train)], "is no model chunk"),
    ],
)
def test_other_targets_are_refused(targets: list[Any], message: str) -> None:
    for target in targets:
        with pytest.raises(MegatronRLPatchesError, match=message):
            reentrant_train(target)


@pytest.mark.usefixtures("frozen")
def test_a_function_keeps_its_attributes_and_is_kept_by_nobody(model: list[Any]) -> None:
    def fit(model: Any) -> None:
        train(model)

    fit.tag = "mine"  # type: ignore[attr-defined]
    guarded = reentrant_train(fit)
    assert (guarded.__name__, vars(guarded)["tag"], vars(guarded)["__wrapped__"]) == ("fit", "mine", fit)
    assert "config" not in vars(reentrant_train(Trainer()))  # the attributes of an object are its own
    reference = weakref.ref(fit)
    guarded(model)
    with pytest.raises(AssertionError, match="no_sync_func must be None"):
        fit(model)
    guarded(model)
    del fit, guarded
    gc.collect()
    assert reference() is None


def test_what_a_failed_call_has_changed_is_as_before(rerun: Any) -> None:
    """Module by module: a frozen vision tower that is in eval mode while the rest trains stays so."""
    chunk, framework_config = DistributedDataParallel(), MockConfig()
    chunk.config.timers = timers = object()
    optimizer: Any = MockOptimizer([chunk])
    machine = rerun._GLOBAL_RERUN_STATE_MACHINE = SimpleNamespace(state=State.RERUNNING, mode="reports")
    vision_tower = next(chunk.module.children())
    vision_tower.eval()
    for reducing, step in ((False, None), (True, print)):
        chunk.force_all_reduce = reducing
        vars(optimizer).update({"step": step} if step else {})
        with failing(chunk, optimizer=optimizer, config=framework_config):
            chunk.force_all_reduce = not reducing
            chunk.train(reducing)
            optimizer.step = max  # as a schedule does
            machine.state, machine.mode = State.NOT_RUNNING_YET, "disabled"
            for config in (chunk.config, framework_config):
                config.no_sync_func, config.grad_sync_func, config.timers = chunk.no_sync, abs, None
        assert chunk.force_all_reduce is reducing
        assert all(module.training is not (module is vision_tower) for module in chunk.modules())
        assert vars(optimizer).get("step") is step
        assert (machine.state, machine.mode) == (State.RERUNNING, "reports")
        assert vars(chunk.config) == vars(MockConfig(timers=timers))
        assert vars(framework_config) == vars(MockConfig())


def test_what_was_absent_is_absent_again(rerun: Any) -> None:
    config = SimpleNamespace(no_sync_func=None)
    chunk: Any = DistributedDataParallel(config)
    del chunk.force_all_reduce, chunk.training
    with failing(chunk):
        config.grad_sync_func = config.timers = abs
        chunk.force_all_reduce = True
        machine = rerun._GLOBAL_RERUN_STATE_MACHINE = SimpleNamespace(state=State.RERUNNING, mode="reports")
    assert vars(config) == {"no_sync_func": None}
    assert not hasattr(chunk, "force_all_reduce") and not hasattr(chunk, "training")
    assert machine.state is State.NOT_RUNNING_YET  # this call has made it
    with failing(chunk, optimizer=type("Slotted", (), {"__slots__": ()})()):
        pass


@pytest.mark.parametrize("in_config", [False, True])
def test_timers(in_config: bool) -> None:
    timers = Timers("mine", "evaluate", running=(INTERVAL_TIMER, "mine"))
    model = [DistributedDataParallel() for _ in range(2)]
    model[1].config.timers = timers if in_config else Timers()
    with failing(model, timers=None if in_config else timers):
        assert timers.running() == {"mine"}
        timers.start(INTERVAL_TIMER, "evaluate")
    assert timers.running() == {"mine", INTERVAL_TIMER}


def test_a_method_that_the_loop_sets_stays(mocker: MockerFixture) -> None:
    chunk: Any = DistributedDataParallel()
    with reentrant_train(chunk):
        chunk.zero_grad_buffer = mine = mocker.stub()
    assert chunk.zero_grad_buffer is mine and "disable_forward_pre_hook" not in vars(chunk)


def test_an_entry_that_fails_changes_nothing(mocker: MockerFixture) -> None:
    timers = Timers(running=(INTERVAL_TIMER,))
    chunk, _ = two_models(MockConfig(timers=timers))
    chunk.config.no_sync_func = chunk.no_sync
    mocker.patch.object(guard, "synchronize_interrupted", side_effect=ZeroDivisionError)
    with pytest.raises(ZeroDivisionError), reentrant_train(chunk):
        pass
    assert chunk.config.no_sync_func == chunk.no_sync
    assert timers.running() == {INTERVAL_TIMER}


def test_status_lists_decorated_functions_as_long_as_they_exist() -> None:
    @reentrant_train
    def fit(model: Any) -> None: ...

    target = f"{__name__}.{fit.__qualname__}"
    [site] = [site for site in status() if site.target == target]
    assert (site.patch, site.state, site.reason) == ("reentrant-train", "applied", "by its decorator")
    del fit
    assert target not in [site.target for site in status()]
