"""Ctrl-C anywhere in the swaps of a ``TeacherPool``: a whole teacher, or none that is claimed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference import TeacherPool
from tests.faults.calls import watched

OWN, ADDED = 0.5, 3.0
TEACHERS = {"a": 1.0, "b": 2.0, "added": ADDED}
_watched = partial(watched, "inference/teachers.py", "inference/weights.py", methods={"copy_"})


def _pool() -> TeacherPool:
    pool = TeacherPool(torch.nn.Linear(2, 3).requires_grad_(False))
    for name in ("a", "b"):
        pool.add(name, _state(pool, TEACHERS[name]))
    _fill(pool.model, OWN)
    return pool


def _state(pool: TeacherPool, value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(weight, value) for name, weight in pool.model.state_dict().items()}


def _fill(model: torch.nn.Module, value: float) -> None:
    for weight in model.state_dict().values():
        weight.fill_(value)


def _values(pool: TeacherPool) -> set[float]:
    return {float(value) for weight in pool.model.state_dict().values() for value in weight.flatten()}


def take_turns(pool: TeacherPool) -> None:
    with pool.use("a"):
        for name in ("b", "a"):
            with pool.use(name):
                pass


def add_from_state(pool: TeacherPool) -> None:
    pool.add("added", _state(pool, ADDED))


def add_within_use(pool: TeacherPool) -> None:
    with pool.use("b"):
        pool.add("added", lambda model: _fill(model, ADDED))
        with pool.use("added"):
            pass


def add_what_the_model_holds(pool: TeacherPool) -> None:
    _fill(pool.model, ADDED)
    pool.add("added")
    with pool.use("a"):
        pass


@pytest.mark.parametrize("scenario", [take_turns, add_from_state, add_within_use, add_what_the_model_holds])
def test_interrupted_at_every_call(scenario: Callable[[TeacherPool], None]) -> None:
    with _watched() as calls:
        scenario(_pool())
    assert len(calls) > 40
    for place in calls:
        pool = _pool()
        with pytest.raises(KeyboardInterrupt), _watched(at=place):
            scenario(pool)
        _check(pool, place)


def _check(pool: TeacherPool, place: Any) -> None:
    held = _values(pool)
    if pool.resident is not None:
        assert held == {TEACHERS[pool.resident]}, f"{place}: {pool.resident} is claimed"
    if not any(held == {value} for value in (OWN, *TEACHERS.values())):
        assert pool.resident is None, place
        with pytest.raises(InvalidInputError, match="interrupted swap"):
            pool.add("torn")
    # Teachers in the pool are whole, and swaps go on.
    for name in pool.names:
        with pool.use(name):
            assert _values(pool) == {TEACHERS[name]}, f"{place}: {name} is not what was added"
            assert pool.resident == name, place
    if "added" not in pool:
        add_from_state(pool)
    with pool.use("added"):
        assert _values(pool) == {ADDED}, place
    pool.remove("added")
    assert pool.names == ["a", "b"], place
