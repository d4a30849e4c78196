"""Parameters on the meta device, and nothing of it in other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.tensor_parallel import random as megatron_random
from torch.nn import Linear, Module, Parameter

from megatron_rl_patches.inference.models.meta_device import NeedsValuesError, construction, materialize


class _Model(Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(3, 3)
        weight = Parameter(torch.empty(2, 3))
        self.weight = weight
        weight.partition_dim = 1  # on the object that it made, not on the one that is registered
        self.tied = self.weight
        self.held_elsewhere = {"weight": self.weight}
        self.register_buffer("counts", torch.ones(4))
        self.inv_freq = 1.0 / torch.arange(1, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied @ x


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


def test_parameters_are_on_meta_and_the_rest_is_real() -> None:
    before, state = _replaced(), torch.get_rng_state()
    with construction(on_meta=True, use_cuda=False):
        model = _Model()
        assert model.weight.cuda() is model.weight
        torch.distributed.all_reduce(model.weight.data)  # would raise: there is no process group
        assert torch.cuda.current_device() == torch.device("cpu")
        torch.cuda.Stream()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.counts.sum() == 4 and model.inv_freq[0] == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert _replaced() == before
    assert not Parameter(torch.ones(1)).is_meta


def _behavior() -> list[str]:
    """What this thread gets from the functions that a build replaces for its own."""
    functions: list[Callable[[], object]] = [
        lambda: Parameter(torch.ones(1)).device,
        torch.ones(1).cuda,
        torch.cuda.current_device,
        torch.cuda.Stream,
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
    expected = _behavior()
    with construction(on_meta=True, use_cuda=False):
        with ThreadPoolExecutor() as pool:
            assert pool.submit(_behavior).result() == expected
        assert _behavior() != expected


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_overlapping_builds_are_undone(first_to_end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_random, "_CUDA_RNG_STATE_TRACKER", None)
    monkeypatch.setattr(megatron_random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False)
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


def test_materialized_parameters_are_the_same_objects() -> None:
    with construction(on_meta=True, use_cuda=False):
        model = _Model()
        model.linear.bfloat16()
    weight = model.weight
    materialize(model, torch.device("cpu"))
    assert model.weight is weight is model.tied is model.held_elsewhere["weight"]
    assert weight.partition_dim == 1 and type(weight) is Parameter and weight.requires_grad
    assert weight.shape == (2, 3) and weight.isnan().all()
    assert model.linear.weight.dtype is torch.bfloat16
    with torch.no_grad():
        weight.fill_(1)
    assert model(torch.ones(3)).sum() == 6


def test_tensors_made_from_a_weight_are_found() -> None:
    holds: list[Callable[[Any], Any]] = [
        lambda view: view,
        lambda view: [1, view],
        lambda view: {"a": (view,)},
    ]
    for hold in holds:
        with construction(on_meta=True, use_cuda=False):
            model = _Model()
            model.linear.views = hold(model.weight.detach().view(-1))
        with pytest.raises(NeedsValuesError, match=r"makes linear\.views from a weight"):
            materialize(model, torch.device("cpu"))
