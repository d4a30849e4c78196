"""How a model is built: its provider, parameters on the meta device, and nothing of it elsewhere."""

import functools
import operator
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.tensor_parallel import random as megatron_random
from pytest import MonkeyPatch
from torch.nn import Linear, Parameter

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference.models.isolation import (
    construction,
    materialize,
    preserved_rng,
    replaced_in_this_thread,
)
from megatron_rl_patches.inference.models.provider import call_provider
from megatron_rl_patches.testing import cpu_backend

ARGUMENTS = {"pre_process": True, "post_process": False, "config": "own", "pg_collection": "groups"}


def _provide(config: Any, pre_process: bool, *, post_process: bool = True, other: int = 0) -> Any:
    return {"config": config, "pre_process": pre_process, "post_process": post_process}


def test_a_provider_gets_what_it_takes() -> None:
    expected = {name: ARGUMENTS[name] for name in ("config", "pre_process", "post_process")}
    wrapped = functools.wraps(_provide)(lambda *args, **kwargs: _provide(*args, **kwargs))
    for provider in (_provide, functools.partial(_provide, config="a policy's"), wrapped):
        assert call_provider(provider, ARGUMENTS) == expected
        with pytest.raises(InvalidInputError, match="takes no vp_stage"):
            call_provider(provider, {**ARGUMENTS, "vp_stage": 1})
    assert call_provider(lambda **kwargs: kwargs, ARGUMENTS | {"vp_stage": 1}) == ARGUMENTS | {"vp_stage": 1}


def _replaced() -> dict[str, Any]:
    """What a build replaces for its own thread, as it is now."""
    return {
        "Parameter": vars(Parameter)["__new__"],
        "all_reduce": torch.distributed.all_reduce,
        "cuda": torch.Tensor.cuda,
        "current_device": torch.cuda.current_device,
        "Stream": torch.cuda.Stream,
        "Stream()": vars(torch.cuda.Stream)["__new__"],
        "DDP": vars(_BaseDataParallel)["__init__"],
        "tracker": megatron_random._CUDA_RNG_STATE_TRACKER,
    }


def _behavior() -> list[str]:
    """What this thread gets from the functions that a build replaces for its own."""
    functions: list[Callable[[], object]] = [
        *(torch.ones(1).cuda, torch.cuda.current_device, torch.cuda.Stream),
        lambda: Parameter(torch.ones(1)).device,
        lambda: torch.distributed.all_reduce(torch.ones(1, device="meta")),
        lambda: megatron_random.get_cuda_rng_tracker().fork().__enter__(),
    ]
    outcomes = []
    for function in functions:
        try:
            outcomes.append(str(function()))
        except Exception as error:
            outcomes.append(repr(error))
    return outcomes


def test_another_thread_sees_nothing_of_a_build() -> None:
    expected, before = _behavior(), _replaced()
    with construction(on_meta=True, use_cuda=False):
        with ThreadPoolExecutor() as pool:
            assert pool.submit(_behavior).result() == expected
        assert all(map(operator.ne, _behavior(), expected))
    assert _behavior() == expected and _replaced() == before


@pytest.fixture
def no_tracker(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_random, "_CUDA_RNG_STATE_TRACKER", None)
    monkeypatch.setattr(megatron_random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False)


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_overlapping_builds_are_undone(first_to_end: int, no_tracker: None) -> None:
    before = _replaced()
    may_end, inside = ([threading.Event(), threading.Event()] for _ in range(2))

    def build(number: int) -> bool:
        with construction(on_meta=True, use_cuda=False):
            inside[number].set()
            may_end[number].wait(30)
            # The tracker that a build has made outlives that build, as the other one uses it.
            with megatron_random.get_cuda_rng_tracker().fork():
                return Parameter(torch.ones(1)).is_meta

    with ThreadPoolExecutor() as pool:
        builds = []
        for number in range(2):
            builds.append(pool.submit(build, number))
            assert inside[number].wait(30)
        for number in (first_to_end, 1 - first_to_end):
            may_end[number].set()
            assert builds[number].result()
    assert _replaced() == before


def test_parameters_get_memory_later_and_stay_the_same_objects() -> None:
    with construction(on_meta=True, use_cuda=False):
        model = Linear(3, 2).bfloat16()
        model.held_elsewhere = {"weight": model.weight}
        model.weight.partition_dim = 1
        model.register_buffer("counts", torch.ones(4))
    weight = model.weight
    assert weight.is_meta and model.counts.sum() == 4
    materialize(model, torch.device("cpu"))
    assert model.weight is weight is model.held_elsewhere["weight"]
    assert weight.partition_dim == 1 and type(weight) is Parameter and weight.requires_grad
    assert weight.shape == (2, 3) and weight.dtype == torch.bfloat16 and weight.isnan().all()


def _drawn() -> tuple[float, ...]:
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_generators_of_the_process(no_tracker: None) -> None:
    with pytest.raises(KeyError), preserved_rng():
        expected = _drawn()
        raise KeyError
    with preserved_rng():
        assert _drawn() == expected
    assert _drawn() == expected
    assert megatron_random._CUDA_RNG_STATE_TRACKER is None, "there was none, and it made one"


@cpu_backend()
def test_megatrons_tracker(no_tracker: None) -> None:
    tracker = megatron_random.get_cuda_rng_tracker()
    tracker.add("dropout", 123)
    with preserved_rng():
        with tracker.fork("dropout"):
            expected = torch.rand(())
        tracker.reset()
        tracker.add("another", 8)
    with tracker.fork("dropout"):
        assert torch.rand(()) == expected
    assert set(tracker.get_states()) == {"dropout"}
    generator = torch.Generator().manual_seed(5)  # as for CUDA graphs: it moves in place
    tracker.set_states({"dropout": generator})
    with preserved_rng():
        expected_next = torch.rand((), generator=generator)
    assert tracker.get_states() == {"dropout": generator}
    assert torch.equal(torch.rand((), generator=generator), expected_next)
    tracker.reset()
    with preserved_rng():
        tracker.add("dropout", 7)
    assert not tracker.is_initialized()


@pytest.mark.parametrize(("is_initialized", "after"), [(True, "before"), (False, "moved on")])
def test_the_cuda_device_that_was_current(is_initialized: bool, after: str, monkeypatch: MonkeyPatch) -> None:
    """Where there is no context, none is created."""
    states = {1: "before"}
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: is_initialized,
        "current_device": is_initialized and (lambda: 1),
        "get_rng_state": states.get,
        "set_rng_state": lambda state, device: states.update({device: state}),
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    with preserved_rng():
        states[1] = "moved on"
    assert states == {1: after}


def test_a_function_that_somebody_has_wrapped_meanwhile_can_be_replaced_again() -> None:
    owner = SimpleNamespace(function=lambda: ["original"])

    def substitute(original: Callable[[], list[str]]) -> list[str]:
        return [*original(), "substitute"]

    with replaced_in_this_thread(owner, "function", substitute):
        ours = owner.function
        owner.function = lambda: [*ours(), "wrapper"]
        assert owner.function() == ["original", "substitute", "wrapper"]
    assert owner.function() == ["original", "wrapper"]
    with pytest.raises(ZeroDivisionError), replaced_in_this_thread(owner, "function", substitute):
        assert owner.function() == ["original", "wrapper", "substitute"]
        raise ZeroDivisionError
    assert owner.function() == ["original", "wrapper"]
