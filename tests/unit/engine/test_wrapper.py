"""The wrapper is invisible to what frameworks do with functions, and can be switched off anywhere."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pickle
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import pytest

from megatron_rl_patches import apply, revert
from megatron_rl_patches.engine.spec import Patch

from .conftest import MODEL, patch_of


@pytest.fixture
def module(framework: Callable[..., str], engine: dict[str, Patch]) -> Iterator[ModuleType]:
    name = framework()
    engine["tagging"] = patch_of(name, "train", "Trainer.step", "Trainer.scale", "Trainer.build")
    apply()
    yield importlib.import_module(f"{name}.model")


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
    assert trainer.step(other, 1) == trainer.step(other, x=1) == trainer.step(self=other, x=1) == ("step", 1)
    assert trainer.step(trainer(), 1) == ("patched", ("step", 1))
    assert trainer.scale(2) == ("patched", 4)
    assert trainer.build(2) == ("patched", ("Trainer", 2))


def test_pickles_by_name(module: ModuleType) -> None:
    data = pickle.dumps(module.train)
    assert pickle.loads(data) is module.train
    revert()
    assert pickle.loads(data) is module.train
    assert b"megatron_rl_patches" in data


def test_a_bound_method_pickles_with_its_instance(module: ModuleType) -> None:
    step = pickle.loads(pickle.dumps(module.Trainer().step))
    assert step(1) == ("patched", ("step", 1))


def test_functions_read_from_a_class_pickle_and_copy_as_before(module: ModuleType) -> None:
    trainer = module.Trainer
    for function, argument in (
        (trainer.step, trainer()),
        (trainer.scale, None),
        (trainer().scale, None),
        (trainer.build, None),
    ):
        for copied in (pickle.loads(pickle.dumps(function)), copy.deepcopy(function)):
            arguments = (argument, 2) if argument else (2,)
            assert copied(*arguments) == function(*arguments)
            assert copied(*arguments)[0] == "patched"


def test_copies_are_the_same_function(module: ModuleType) -> None:
    config = {"train": module.train, "partial": functools.partial(module.train, "m")}
    assert copy.copy(module.train) is module.train
    assert copy.deepcopy(config)["train"] is module.train
    assert copy.deepcopy(config)["partial"]() == ("patched", ("trained", "m", 1))


def test_a_deep_copied_bound_method_belongs_to_the_copied_instance(module: ModuleType) -> None:
    trainer = module.Trainer()
    config = {"trainer": trainer, "step": trainer.step}
    copied = copy.deepcopy(config)
    assert copied["step"].__self__ is copied["trainer"] is not trainer
    assert copy.copy(trainer.step).__self__ is trainer


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
