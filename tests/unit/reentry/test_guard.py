"""One call of a train-like function, against mocked DDP."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from contextlib import suppress
from typing import Any

import pytest
from pytest_mock import MockerFixture

from megatron_rl_patches import MegatronRLPatchesError
from megatron_rl_patches.reentry import recovery, reentrant_train
from megatron_rl_patches.testing import MockConfig, MockDDP, MockOptimizer


def train(model: list[MockDDP], optimizer: MockOptimizer | None = None, fails: bool = False) -> None:
    """A loop of the shape that all frameworks share."""
    config = model[0].config
    assert config.no_sync_func is None, "When overlap_grad_reduce is True, config.no_sync_func must be None"
    config.no_sync_func = model[0].no_sync
    for chunk in model:
        chunk.train()
    if fails:
        raise ZeroDivisionError


plain = {"overlap_param_gather": False, "use_distributed_optimizer": False}


def test_the_decorator_lets_a_second_call_work() -> None:
    model = [MockDDP(**plain)]
    train(model)
    with pytest.raises(AssertionError, match="no_sync_func must be None"):
        train(model)
    guarded = reentrant_train(train)
    for _ in range(3):
        guarded(model, optimizer=MockOptimizer(model))
    assert model[0].config.no_sync_func == model[0].no_sync
    assert guarded.__name__ == "train" and guarded.__wrapped__ is train  # type: ignore[attr-defined]


def test_a_function_that_relies_on_what_others_installed_keeps_it() -> None:
    model = [MockDDP(**plain)]
    model[0].config.no_sync_func = model[0].no_sync
    seen = []

    def fit(model: Any) -> None:
        seen.append(vars(model[0].config)["no_sync_func"])

    reentrant_train(fit, installs=False)(model)
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


def test_a_failing_recovery_does_not_hide_the_exception(
    mocker: MockerFixture, caplog: pytest.LogCaptureFixture
) -> None:
    chunk = MockDDP(**plain)
    mocker.patch.object(chunk.bucket_groups[0], "reset", side_effect=RuntimeError("peer is gone"))
    reset = mocker.spy(chunk.bucket_groups[1], "reset")
    with caplog.at_level(logging.WARNING), pytest.raises(ZeroDivisionError), reentrant_train(chunk):
        raise ZeroDivisionError
    assert caplog.messages == ["recovering a bucket group failed: RuntimeError: peer is gone"]
    assert reset.call_count == 1


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
    mocker.patch.object(recovery, "_any_rank_was", return_value=True)
    mocker.patch.object(recovery, "_by_process_group", return_value=[(None, chunk.bucket_groups)])
    order: list[str] = []
    mocker.patch.object(recovery, "_gather_parameters", side_effect=lambda groups: order.append("gather"))

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


def test_a_stale_function_is_not_put_back(caplog: pytest.LogCaptureFixture) -> None:
    class DistributedDataParallel(MockDDP):
        pass

    chunk = MockDDP(**plain)
    chunk.config.no_sync_func = DistributedDataParallel().no_sync
    with reentrant_train(chunk):
        pass
    assert chunk.config.no_sync_func is None
    assert caplog.text == ""


def test_functions_whose_body_runs_after_the_call_are_refused() -> None:
    def batches(model: Any) -> Any:
        yield

    async def fit(model: Any) -> None: ...

    async def stream(model: Any) -> Any:
        yield

    class Batches:
        def __call__(self, model: Any) -> Any:
            yield

    for function in (batches, fit, stream, functools.partial(batches, []), Batches()):
        with pytest.raises(
            MegatronRLPatchesError, match=r"runs after the call; use 'with reentrant_train\(model\):' inside"
        ):
            reentrant_train(function)


class Trainer:
    """Its instances are callable, and keep what they were called with."""

    def __init__(self) -> None:
        self.config = "not that of a model"

    def __call__(self, model: list[MockDDP], optimizer: Any = None) -> None:
        train(model)


@pytest.mark.parametrize(
    ("wrap", "takes_model"),
    [
        (lambda model: functools.partial(train), True),
        (lambda model: functools.partial(train, fails=False), True),
        (lambda model: functools.partial(functools.partial(train, optimizer=None), model), False),
        (lambda model: functools.partial(train, model=model), False),
        (lambda model: Trainer(), True),
        (lambda model: Trainer().__call__, True),
        (lambda model: functools.partial(Trainer()), True),
    ],
)
def test_partials_and_callable_objects(wrap: Any, takes_model: bool) -> None:
    model = [MockDDP(**plain)]
    guarded = reentrant_train(wrap(model))
    for _ in range(2):
        guarded(model) if takes_model else guarded()
    assert model[0].config.no_sync_func == model[0].no_sync


def test_attributes_of_a_function_are_kept_and_those_of_an_object_are_not() -> None:
    def fit(model: Any) -> None: ...

    fit.tag = "mine"  # type: ignore[attr-defined]
    assert vars(reentrant_train(fit))["tag"] == "mine"
    assert "config" not in vars(reentrant_train(Trainer()))


def test_a_decorated_function_takes_options() -> None:
    chunk, config = MockDDP(**plain), MockConfig(no_sync_func=None)
    config.no_sync_func = chunk.no_sync
    seen = []

    def fit(model: Any) -> None:
        seen.append(config.no_sync_func)

    reentrant_train(fit, config=config, installs=True)(chunk)
    assert seen == [None]


def test_the_context_manager_takes_one_chunk_or_any_container() -> None:
    chunk = MockDDP(**plain)
    for target in ([chunk], chunk, (chunk,), dict.fromkeys([chunk]).keys()):
        with reentrant_train(target):
            train([chunk])


def test_the_exception_is_the_callers_own() -> None:
    model = [MockDDP(**plain)]
    with pytest.raises(ZeroDivisionError) as caught:
        reentrant_train(train)(model, MockOptimizer(model), fails=True)
    assert caught.value.__context__ is None and caught.value.__cause__ is None
    assert caught.traceback[-1].name == "train"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("enabled_inside", [True, False])
def test_garbage_collection_is_as_it_was(enabled: bool, enabled_inside: bool, fails: bool) -> None:
    try:
        (gc.enable if enabled else gc.disable)()
        with suppress(ZeroDivisionError), reentrant_train(MockDDP(**plain)):
            (gc.enable if enabled_inside else gc.disable)()
            if fails:
                raise ZeroDivisionError
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_a_target_without_model_and_a_class_are_refused_by_name() -> None:
    def fit(chunks: Any) -> None: ...

    class Fitter:
        def __call__(self, chunks: Any) -> None: ...

    for target, name in ((fit, "fit"), (Fitter(), "Fitter.__call__")):
        with pytest.raises(
            MegatronRLPatchesError,
            match=rf"{name}\(chunks: .* no parameter named 'model' .*; use 'with .*:' inside it instead$",
        ):
            reentrant_train(target)
    for target in (Trainer, functools.partial(Trainer), functools.partial(functools.partial(Trainer), 1)):
        with pytest.raises(MegatronRLPatchesError, match="Trainer is a class"):
            reentrant_train(target)


def test_one_parameter_takes_the_model() -> None:
    def chunks_one_by_one(*model: Any) -> None: ...

    def by_keyword(**model: Any) -> None: ...

    for function in (chunks_one_by_one, by_keyword):
        with pytest.raises(MegatronRLPatchesError, match=rf"{function.__name__}\(\*.* no parameter named"):
            reentrant_train(function)
    with pytest.raises(MegatronRLPatchesError, match=r"^max has no signature.*; use 'with .*:' inside it"):
        reentrant_train(max)


@pytest.mark.parametrize("target", [5, "x", object(), [5], {"model": "x"}, classmethod(train)])
def test_what_is_neither_a_model_nor_a_function_is_refused(target: Any) -> None:
    with pytest.raises(MegatronRLPatchesError, match="is no model chunk"):
        reentrant_train(target)


def test_a_function_is_kept_alive_by_nobody() -> None:
    def fit(model: Any) -> None:
        train(model)

    reference = weakref.ref(fit)
    reentrant_train(fit)([MockDDP(**plain)])
    del fit
    gc.collect()
    assert reference() is None


def test_a_function_made_by_exec_which_has_no_module_may_install() -> None:
    namespace: dict[str, Any] = {}
    exec("def fit(model): set_it(model[0].config, model[0].no_sync)", namespace)
    exec("def set_it(config, function): config.no_sync_func = function", functions := {})
    namespace["set_it"] = functions["set_it"]
    model = [MockDDP(**plain)]
    for _ in range(2):
        reentrant_train(namespace["fit"])(model)
