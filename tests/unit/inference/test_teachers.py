"""``TeacherPool`` on small plain modules: what is resident when, bit for bit, and what is refused."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
from pytest import FixtureRequest, MonkeyPatch

from megatron_rl_patches.errors import InferenceOnlyError, InvalidInputError
from megatron_rl_patches.inference import TeacherPool, teachers
from megatron_rl_patches.inference.teachers import HostCopy
from megatron_rl_patches.losses import OutputHead


class Net(torch.nn.Module):
    """Tied weights, several dtypes, a persistent and a non-persistent buffer, an empty parameter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = torch.nn.Parameter(torch.randn(3, 5, generator=generator))
        self.head = self.embedding
        self.scale = torch.nn.Parameter(torch.randn(7, generator=generator).bfloat16())
        self.empty = torch.nn.Parameter(torch.empty(0))
        self.register_buffer("expert_bias", torch.randn(4, generator=generator))
        self.register_buffer("scratch", torch.randn(2, generator=generator), persistent=False)
        self.requires_grad_(False)


STATES = {name: Net(seed).state_dict() for seed, name in enumerate(("own", "a", "b", "c"))}
# A NaN with a payload, which arithmetic would lose.
STATES["a"]["embedding"].view(torch.int32)[0, 0] = 0x7FC12345


def loading(name: str) -> Callable[[Net], object]:
    return lambda model: model.load_state_dict(STATES[name])


def holds(model: torch.nn.Module, name: str) -> bool:
    state = model.state_dict()
    pairs = ((state[key], value) for key, value in STATES[name].items() if value.numel())
    return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)


@pytest.fixture(params=[1, 7, 16, teachers._BLOCK_BYTES])
def model(request: FixtureRequest, monkeypatch: MonkeyPatch) -> Net:
    """Copies of its weights cross the boundaries of small blocks, or are in one."""
    monkeypatch.setattr(teachers, "_BLOCK_BYTES", request.param)
    return Net(0)


@pytest.fixture
def pool(model: Net) -> TeacherPool:
    """Three teachers; the model holds weights of its own."""
    pool = TeacherPool(model)
    for name in ("a", "b", "c"):
        pool.add(name, loading(name))
    return pool


def copies() -> Any:
    return mock.patch.object(HostCopy, "copy_to", autospec=True, side_effect=HostCopy.copy_to)


def test_nested_uses_put_back_what_the_outer_ones_had(pool: TeacherPool, model: Net) -> None:
    tensors, scratch = (*model.parameters(), *model.buffers()), model.scratch.clone()
    storages = [tensor.data_ptr() for tensor in tensors]
    with pytest.raises(ZeroDivisionError), pool.use("a"):
        assert model.head is model.embedding and torch.equal(model.scratch, scratch)
        with pytest.raises(KeyError), pool.use("b"):
            with pool.use("a"), pool.use("a") as used:
                assert used is model and holds(model, "a") and pool.resident == "a"
            assert holds(model, "b")
            raise KeyError
        assert holds(model, "a")
        raise ZeroDivisionError
    assert holds(model, "own") and pool.resident is None
    assert [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())] == storages


def test_a_head_whose_memory_was_dropped_is_written_again(pool: TeacherPool, model: Net) -> None:
    """As ``torch_memory_saver`` does it, whose ``resume`` brings memory without what was there."""
    target = "megatron_rl_patches.inference.scoring.forward.output_head"
    with mock.patch(target, lambda model: OutputHead(model.embedding, model.expert_bias[:3])):
        head = pool.head("b")
        assert head is not None
        for tensor in head.tensors:
            tensor.data.fill_(7.0)
            assert pool.head("b") is head
            assert torch.equal(head.weight, STATES["b"]["embedding"])
            assert torch.equal(head.bias, STATES["b"]["expert_bias"][:3])
        with mock.patch.object(HostCopy, "copy_to") as copy_to:
            assert pool.head("b") is head
        assert not copy_to.called
    assert holds(model, "own")


def test_taking_turns_costs_one_copy_a_turn(pool: TeacherPool, model: Net) -> None:
    pool.add("own")
    with copies() as copy_to, mock.patch.object(HostCopy, "__init__") as snapshot:
        for name in ("a", "a", "b", "a"):
            with pool.use(name), pool.use(name):
                assert holds(model, name)
            assert holds(model, name) and pool.resident == name
    assert copy_to.call_count == 3
    snapshot.assert_not_called()


@pytest.mark.parametrize(
    "setter",
    [
        *(torch.Tensor.copy_, lambda weight, value: weight.data.copy_(value)),
        *(lambda weight, value: setattr(weight, "data", value), None),
    ],
    ids=["in place", "into data", "other data", "assigned"],
)
def test_weights_are_noticed_however_they_are_loaded(setter: Any, model: Net) -> None:
    @torch.no_grad()
    def load(name: str) -> None:
        state = deepcopy(STATES[name])
        if setter is None:
            model.load_state_dict(state, assign=True)
        else:
            for key, weight in model.state_dict(keep_vars=True).items():
                setter(weight, state[key])

    pool = TeacherPool(model)
    for name in ("a", "c"):
        load(name)
        pool.add(name)
    load("own")  # where the pool has left c
    pool.add("d", loading("a"))
    assert holds(model, "own")
    with pool.use("c"):
        load("b")
        assert pool.resident is None
        with pool.use("c"):
            assert holds(model, "c")
        assert holds(model, "b")
    assert holds(model, "own") and pool.resident is None


def test_a_model_that_was_built_and_not_loaded_has_nothing_to_lose(model: Net) -> None:
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    pool = TeacherPool(model)
    with pytest.raises(InvalidInputError, match="nothing to add, only NaN"):
        pool.add("own")
    pool.add("a", loading("a"))
    assert pool.resident == "a"
    pool.add("b", loading("b"))
    assert pool.resident == "a" and holds(model, "a")
    with copies() as copy_to, pool.use("b"):
        pass
    assert copy_to.call_count == 1 and holds(model, "b")


def test_a_loader_that_fails_leaves_the_weights(pool: TeacherPool, model: Net) -> None:
    def fail(model: Net) -> None:
        model.scale.fill_(0)
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        pool.add("d", fail)
    assert holds(model, "own") and "d" not in pool
    with pool.use("a"):
        with pytest.raises(OSError, match="disk"):
            pool.add("d", fail)
        assert holds(model, "a") and pool.resident == "a"


def test_names_and_removed_weights_that_are_kept_while_needed(pool: TeacherPool, model: Net) -> None:
    assert (pool.names, len(pool), "a" in pool, "x" in pool) == (["a", "b", "c"], 3, True, False)
    with pytest.raises(InvalidInputError, match=r"no teacher 'x'.*'a', 'b', 'c'"), pool.use("x"):
        pass
    with pytest.raises(InvalidInputError, match="there is a teacher 'a' already"):
        pool.add("a", loading("a"))
    pool.remove("b")
    assert pool.names == ["a", "c"]
    with pool.use("a"), pytest.raises(InvalidInputError, match="'a' is in use"):
        pool.remove("a")
    pool.add("own")
    pool.add("same")
    pool.remove("own")
    assert pool.resident == "same"
    with pool.use("c"):
        pool.remove("same")
        assert holds(model, "c")
    assert holds(model, "own") and pool.resident is None


def test_models_that_a_pool_cannot_have_and_changed_ones_are_refused(pool: TeacherPool, model: Net) -> None:
    with pytest.raises(InvalidInputError, match=r"weight \(Parameter on meta\) has no plain memory"):
        TeacherPool(torch.nn.Linear(2, 2, device="meta").requires_grad_(False))
    model.requires_grad_(True)
    with pytest.raises(InferenceOnlyError, match="embedding requires grad"), pool.use("a"):
        pass
    model.requires_grad_(False)
    with pytest.raises(InvalidInputError, match=r"scale is torch\.float32 in the changed model"):
        pool.add("d", lambda model: setattr(model.scale, "data", model.scale.data.float()))
    model.register_buffer("late", torch.zeros(1))
    changed = r"no longer the one .*unexpected in the changed model \(1\): late"
    with pytest.raises(InvalidInputError, match=changed), pool.use("a"):
        pass
