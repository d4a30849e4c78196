"""One call of a train-like function, against mocked DDP."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
from pytest_mock import MockerFixture

from megatron_rl_patches import MegatronRLPatchesError
from megatron_rl_patches.reentry import recovery, reentrant_train
from megatron_rl_patches.reentry.guard import installs_sync_functions
from megatron_rl_patches.testing import MockDDP, MockOptimizer


def train(model: list[MockDDP], optimizer: MockOptimizer | None = None, fails: bool = False) -> None:
    """In the shape that all hosts share."""
    config = model[0].config
    assert config.no_sync_func is None, "When overlap_grad_reduce is True, config.no_sync_func must be None"
    config.no_sync_func = model[0].no_sync
    for chunk in model:
        chunk.train()
    if fails:
        raise ZeroDivisionError


plain = {"overlap_param_gather": False, "use_distributed_optimizer": False}


def test_the_decorator_mends_the_second_call() -> None:
    model = [MockDDP(**plain)]
    train(model)
    with pytest.raises(AssertionError, match="no_sync_func must be None"):
        train(model)
    guarded = reentrant_train(train)
    for _ in range(3):
        guarded(model, optimizer=MockOptimizer(model))
    assert model[0].config.no_sync_func == model[0].no_sync
    assert guarded.__name__ == "train" and guarded.__wrapped__ is train  # type: ignore[attr-defined]


def test_the_context_manager_takes_a_list_or_one_chunk() -> None:
    chunk = MockDDP(**plain)
    for target in ([chunk], chunk, [chunk]):
        with reentrant_train(target):
            train([chunk])


def test_a_function_without_model_is_refused() -> None:
    with pytest.raises(MegatronRLPatchesError, match="no parameter named 'model'"):

        @reentrant_train
        def fit(chunks: Any) -> None: ...


def test_a_function_that_relies_on_what_others_installed_keeps_it() -> None:
    model = [MockDDP(**plain)]
    model[0].config.no_sync_func = model[0].no_sync
    seen = []

    @reentrant_train
    def fit(model: Any) -> None:
        seen.append(vars(model[0].config)["no_sync_func"])

    fit(model)
    assert seen == [model[0].no_sync]


def test_a_body_that_does_not_install_is_warned_of_and_the_function_put_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chunk = MockDDP(**plain)
    chunk.config.no_sync_func = chunk.no_sync
    with reentrant_train(chunk):
        pass
    assert chunk.config.no_sync_func == chunk.no_sync
    assert "gradients were reduced after every microbatch" in caplog.text


def test_an_exception_leaves_all_as_at_entry() -> None:
    model = [MockDDP(**plain)]
    optimizer = MockOptimizer(model)
    model[0].eval()
    before = dict(vars(model[0].config))
    with pytest.raises(ZeroDivisionError) as caught:
        reentrant_train(train)(model, optimizer, fails=True)
    assert dict(vars(model[0].config)) == before
    assert not model[0].training and not any(module.training for module in model[0].modules())
    assert caught.value.__context__ is None and caught.value.__cause__ is None
    assert caught.traceback[-1].name == "train"


def test_garbage_collection_is_as_it_was() -> None:
    chunk = MockDDP(**plain)
    for fails in (False, True):
        try:
            with reentrant_train(chunk):
                gc.disable()
                if fails:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        assert gc.isenabled()
    gc.disable()
    try:
        for enables in (False, True):
            with reentrant_train(chunk):
                if enables:
                    gc.enable()
            assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_failing_recovery_does_not_hide_the_exception(
    mocker: MockerFixture, caplog: pytest.LogCaptureFixture
) -> None:
    chunk = MockDDP(**plain)
    mocker.patch.object(chunk.bucket_groups[0], "reset", side_effect=RuntimeError("peer is gone"))
    reset = mocker.spy(chunk.bucket_groups[1], "reset")
    with caplog.at_level(logging.WARNING), pytest.raises(ZeroDivisionError), reentrant_train(chunk):
        raise ZeroDivisionError
    assert "RuntimeError: peer is gone" in caplog.text
    assert reset.call_count == 1


@pytest.mark.parametrize("old", [True, False])
def test_bucket_groups_are_reset_in_old_and_new_releases(old: bool, mocker: MockerFixture) -> None:
    chunk = MockDDP()
    group = chunk.bucket_groups[0]
    if old:  # up to 0.15: a set of parameters, no first batch
        del group.is_first_batch, group.per_param_grad_ready_counts
        group.params_with_grad = {object()}  # type: ignore[attr-defined]

        def reset() -> None:
            group.params_with_grad = set()  # type: ignore[attr-defined]
            group.is_last_microbatch = True

        mocker.patch.object(group, "reset", reset)
    else:
        group.per_param_grad_ready_counts = {next(iter(group.params)): 1, object(): 1}  # type: ignore[dict-item]
    group.is_last_microbatch = False
    group.start_grad_sync() if not old else None
    recovery.recover([chunk], ZeroDivisionError())
    assert group.is_last_microbatch and group.grad_reduce_handle is None
    if old:
        assert group.params_with_grad == set()  # type: ignore[attr-defined]
    else:
        assert group.per_param_grad_ready_counts == {} and group.is_first_batch


def test_without_overlap_an_interrupted_update_is_gathered_at_the_next_entry() -> None:
    chunk = MockDDP(overlap_param_gather=False)
    with pytest.raises(ZeroDivisionError), reentrant_train(chunk):
        chunk.finish_grad_sync()
        for group in chunk.bucket_groups:
            group.is_stale = True
        raise ZeroDivisionError
    with reentrant_train(chunk):
        assert not any(group.is_stale for group in chunk.bucket_groups)
    chunk.calls.clear()
    with reentrant_train(chunk):
        pass
    assert chunk.calls == []


def test_mxfp8_is_staged_before_it_is_gathered(mocker: MockerFixture) -> None:
    chunk = MockDDP(reuse_grad_buf_for_mxfp8_param_ag=True)
    mocker.patch.object(recovery, "_any_rank", return_value=True)
    mocker.patch.object(recovery, "_by_process_group", return_value=[(None, chunk.bucket_groups)])
    order: list[str] = []
    mocker.patch.object(recovery, "_gather", side_effect=lambda groups: order.append("gather"))

    class Part:
        def _copy_main_params_to_param_buffer(self) -> None:
            order.append("stage")

    class Chained:
        chained_optimizers = (Part(), Part())

    class New(Chained):
        def prepare_model_params_for_param_sync(self) -> None:
            order.append("prepare")

    recovery.synchronize_interrupted([chunk], Chained())
    recovery.synchronize_interrupted([chunk], New())
    assert order == ["stage", "stage", "gather", "prepare", "gather"]
    with pytest.raises(MegatronRLPatchesError, match="pass the optimizer"):
        recovery.synchronize_interrupted([chunk], None)
    assert len(order) == 5


def test_timers(mocker: MockerFixture) -> None:
    class Timer:
        def __init__(self, started: bool) -> None:
            self._started = started

        def reset(self) -> None:
            self._started = False

    class Timers:
        def __init__(self, **started: bool) -> None:
            self._timers = {name.replace("_", "-"): Timer(on) for name, on in started.items()}

        def running(self) -> set[str]:
            return {name for name, timer in self._timers.items() if timer._started}

    timers = Timers(interval_time=True, mine=True, evaluate=False)
    with pytest.raises(ZeroDivisionError), reentrant_train(MockDDP(**plain), timers=timers):
        assert timers.running() == {"mine"}
        timers._timers["interval-time"]._started = True
        timers._timers["evaluate"]._started = True
        raise ZeroDivisionError
    assert timers.running() == {"mine", "interval-time"}


def test_contexts_of_a_chained_exception_are_left_too() -> None:
    chunk = MockDDP(**plain)

    def schedule() -> None:
        context = chunk.no_sync()
        context.__enter__()
        raise ValueError

    error: BaseException | None = None
    try:
        with reentrant_train(chunk):
            try:
                schedule()
            except ValueError as cause:
                raise RuntimeError from cause
    except RuntimeError as raised:
        error = raised
    assert error is not None
    for group in chunk.bucket_groups:
        group.is_last_microbatch = False
    error = None
    gc.collect()
    assert not any(group.is_last_microbatch for group in chunk.bucket_groups)


def test_locals_that_dislike_being_looked_at_are_left_alone() -> None:
    class Prickly:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    with pytest.raises(ZeroDivisionError), reentrant_train(MockDDP(**plain)):
        prickly = Prickly()
        raise ZeroDivisionError(id(prickly))


def test_no_model_is_no_error_of_ours() -> None:
    for model in (None, []):
        with pytest.raises(ZeroDivisionError), reentrant_train(model):
            raise ZeroDivisionError


def test_a_handle_whose_wait_fails_is_dropped(mocker: MockerFixture) -> None:
    chunk = MockDDP()
    group = chunk.bucket_groups[0]
    group.start_grad_sync()
    mocker.patch.object(group.grad_reduce_handle, "wait", side_effect=RuntimeError("timed out"))
    recovery.recover([chunk], ZeroDivisionError())
    assert group.grad_reduce_handle is None


def test_a_container_of_chunks_is_a_model() -> None:
    class ModuleList:
        def __init__(self, chunks: list[MockDDP]) -> None:
            self.chunks = chunks

        def __iter__(self) -> Any:
            return iter(self.chunks)

    chunk = MockDDP(**plain)
    chunk.config.no_sync_func = chunk.no_sync
    with reentrant_train(ModuleList([chunk])):
        train([chunk])


def test_a_stale_function_is_not_put_back(caplog: pytest.LogCaptureFixture) -> None:
    class DistributedDataParallel(MockDDP):
        pass

    chunk = MockDDP(**plain)
    chunk.config.no_sync_func = DistributedDataParallel().no_sync
    with reentrant_train(chunk):
        pass
    assert chunk.config.no_sync_func is None
    assert caplog.text == ""


def test_what_runs_after_the_call_is_refused() -> None:
    def batches(model: Any) -> Any:
        yield

    async def fit(model: Any) -> None: ...

    for function in (batches, fit):
        with pytest.raises(MegatronRLPatchesError, match="runs after the call"):
            reentrant_train(function)


def test_a_function_defined_inside_may_install() -> None:
    model = [MockDDP(**plain)]

    @reentrant_train
    def fit(model: Any) -> None:
        def install() -> None:
            assert model[0].config.no_sync_func is None
            model[0].config.no_sync_func = model[0].no_sync

        install()

    for _ in range(2):
        fit(model)


def _install(config: Any, chunk: MockDDP) -> None:
    assert config.no_sync_func is None
    config.no_sync_func = chunk.no_sync


def test_a_function_of_the_same_package_may_install() -> None:
    model = [MockDDP(**plain)]

    @reentrant_train
    def fit(model: Any) -> None:
        _install(model[0].config, model[0])

    for _ in range(2):
        fit(model)
    assert installs_sync_functions(fit)
    assert not installs_sync_functions(logging.getLogger)
