"""Every random stream goes on where it was, and functions that were replaced can be replaced again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random

from megatron_rl_patches.inference.models.isolation import original_of, preserved_rng, replaced_in_this_thread
from megatron_rl_patches.testing import cpu_backend


@pytest.fixture
def no_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_random, "_CUDA_RNG_STATE_TRACKER", None)
    monkeypatch.setattr(megatron_random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False)


@pytest.fixture
def tracker(no_tracker: None) -> Iterator[Any]:
    with cpu_backend():
        tracker = megatron_random.get_cuda_rng_tracker()
        tracker.add("dropout", 123)
        yield tracker


@pytest.mark.parametrize("raises", [False, True])
def test_generators_of_the_process(raises: bool, no_tracker: None) -> None:
    with suppress(KeyError), preserved_rng():
        expected = (random.random(), np.random.rand(), torch.rand(()).item())
        if raises:
            raise KeyError
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected
    assert megatron_random._CUDA_RNG_STATE_TRACKER is None, "there was none, and it made one"


def test_megatrons_tracker(tracker: Any) -> None:
    def drawn() -> float:
        with tracker.fork("dropout"):
            return torch.rand(()).item()

    for seeded_anew in (False, True):
        with preserved_rng():
            expected = drawn()
            if seeded_anew:
                tracker.reset()
                tracker.add("dropout", 7)
                tracker.add("another", 8)
        assert drawn() == expected
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


def test_creates_no_cuda_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("current_device", "get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, None)  # calling it would initialize CUDA
    with preserved_rng():
        pass


def test_the_cuda_device_that_was_current(monkeypatch: pytest.MonkeyPatch) -> None:
    states, current = {0: "a", 1: "b"}, 1
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: current,
        "get_rng_state": lambda device: states[device],
        "set_rng_state": lambda state, device: states.update({device: state}),
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    with preserved_rng():
        states[1], current = "moved on", 0
    assert states == {0: "a", 1: "b"}


def test_a_function_that_somebody_has_wrapped_meanwhile_can_be_replaced_again() -> None:
    owner = SimpleNamespace(function=lambda: ["original"])

    def substitute() -> list[str]:
        return [*original_of(owner, "function")(), "substitute"]

    with replaced_in_this_thread(owner, "function", substitute):
        ours = owner.function
        owner.function = lambda: [*ours(), "wrapper"]
        assert owner.function() == ["original", "substitute", "wrapper"]
    assert owner.function() == ["original", "wrapper"]
    with pytest.raises(ZeroDivisionError), replaced_in_this_thread(owner, "function", substitute):
        assert owner.function() == ["original", "wrapper", "substitute"]
        raise ZeroDivisionError
    assert owner.function() == ["original", "wrapper"]
