"""The wrapper is invisible to what frameworks do with functions; what an adapter can ask of a call."""

import copy
import functools
import inspect
import pickle
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import wrapt

from megatron_rl_patches import apply, revert
from megatron_rl_patches.engine.call import Call

from .conftest import MODEL, Framework


@pytest.fixture
def module(tagged: Framework) -> ModuleType:
    package = tagged("train", "Base.fit", "Trainer.step", "Trainer.scale", "Trainer.build")
    apply()
    return package.model


def test_looks_like_the_original(module: ModuleType) -> None:
    original = module.train.__wrapped__
    assert module.train.__name__ == "train"
    assert module.train.__doc__ == "Train it."
    assert module.train.__module__ == module.__name__
    assert inspect.signature(module.train) == inspect.signature(original)
    assert inspect.getsource(module.train) in MODEL
    assert inspect.unwrap(module.train) is original
    assert inspect.isfunction(module.Trainer.step)
    assert inspect.ismethod(module.Trainer().step)
    assert module.train == original
    assert hash(module.train) == hash(original)


def test_a_method_called_on_an_object_of_another_class_is_the_original(module: ModuleType) -> None:
    """As tests of frameworks do, which give a simple object for ``self``; adapters expect the class."""
    trainer, other = module.Trainer, SimpleNamespace()
    assert trainer.step(other, 1) == trainer.step(other, x=1) == ("step", 1)
    if [*map(int, wrapt.__version__.split(".")[:2])] >= [1, 17]:  # before, wrapt takes self by position only
        assert trainer.step(self=other, x=1) == ("step", 1)
    assert trainer.step(trainer(), 1) == ("patched", ("step", 1))
    assert trainer().fit(1) == ("patched", ("fit", 1))  # inherited
    assert trainer.scale(2) == ("patched", 4)
    assert trainer.build(2) == ("patched", ("Trainer", 2))


def test_a_method_that_others_call_through_the_class_binds_by_name(tagged: Framework) -> None:
    """As miles does with ``MambaModel.forward``: the adapter gets the function bound to the instance."""

    def binding(call: Call) -> dict[str, Any]:
        assert call.function.__self__ is call.instance  # type: ignore[attr-defined]
        return call.arguments

    package = tagged("Trainer.step", adapter=binding)
    apply()
    trainer = package.model.Trainer
    original = trainer.step
    trainer.step = lambda self, *args, **kwargs: original(self, *args, **kwargs)
    assert trainer().step(1) == trainer().step(x=1) == {"x": 1}


def test_functions_pickle_and_copy_as_before(module: ModuleType) -> None:
    """By name, without this package."""
    trainer = module.Trainer
    for function, arguments in (
        (module.train, ("m",)),
        (trainer.step, (trainer(), 2)),
        (trainer.scale, (2,)),
        (trainer().scale, (2,)),
        (trainer.build, (2,)),
        (trainer().step, (1,)),
    ):
        data = pickle.dumps(function)
        assert b"megatron_rl_patches" not in data
        for copied in (pickle.loads(data), copy.deepcopy(function)):
            assert copied(*arguments) == function(*arguments)
            assert copied(*arguments)[0] == "patched"
    data = pickle.dumps(module.train)
    partial = functools.partial(module.train, "m")
    assert copy.copy(module.train) is copy.deepcopy([module.train])[0] is module.train
    assert copy.deepcopy({"partial": partial})["partial"]() == ("patched", ("trained", "m", 1))
    assert pickle.loads(data) is module.train
    revert()
    assert pickle.loads(data) is module.train


def test_a_copied_bound_method_belongs_to_the_copied_instance(module: ModuleType) -> None:
    trainer = module.Trainer()
    step = trainer.step
    copied = copy.deepcopy({"trainer": trainer, "step": step})
    assert copied["step"].__self__ is copied["trainer"] is not trainer
    assert copy.copy(step).__self__ is trainer
    trainer.step = lambda x: "of the instance"
    assert copy.deepcopy(step)(1) == ("patched", ("step", 1))
    assert copy.deepcopy(trainer.build)(1) == ("patched", ("Trainer", 1))


def test_torch_compile_neither_breaks_nor_sees_the_layer(module: ModuleType) -> None:
    """One graph, as without us; but a compiled caller inlines the original."""
    torch = pytest.importorskip("torch")
    graphs = []

    def backend(graph: object, inputs: object) -> object:
        graphs.append(graph)
        return graph

    trainer = module.Trainer()

    @functools.partial(torch.compile, backend=backend, fullgraph=True)
    def compiled(x: object) -> object:
        return trainer.step(x + 1)  # type: ignore[operator]

    tag, x = compiled(torch.ones(2))
    assert (tag, x.tolist()) == ("step", [2.0, 2.0])
    assert len(graphs) == 1


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
